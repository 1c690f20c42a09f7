from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import SNIP, SSFL, FedAvg, PruneFL
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.scores import snip
from lightning_sparsefl.types import Merged, Message

LAYERS = {
    "a.weight": torch.tensor([[1.0, -2.0], [3.0, 4.0]]),
    "a.bias": torch.ones(2),
    "b.weight": torch.tensor([[1.0, 1.0]]),
    "norm.mean": torch.ones(2, 2),
}
SLOPES = {
    "a.weight": torch.tensor([[5.0, 1.0], [-1.0, 0.0]]),
    "a.bias": torch.ones(2),
    "b.weight": torch.tensor([[0.1, -0.2]]),
}


@pytest.fixture
def pruned(fleet):
    """The state of a method before round 0, whose clients answer with `SLOPES`, and what they were asked."""

    def start(method):
        asked = []

        def survey(message):
            asked.append(message)
            return Merged(weights=SLOPES, covered={})

        return method.init(LAYERS, fleet(buffers=["norm.mean"], survey=survey)), asked

    return start


@pytest.mark.parametrize("method", [SNIP(), SSFL(), PruneFL(first="snip")], ids=lambda method: type(method).__name__)
def test_scores_that_are_all_zero_are_refused(fleet, method):
    """As behind a last layer of zeros, which passes no gradient and has weights of 0 itself."""
    slopes = {**{name: torch.zeros_like(value) for name, value in SLOPES.items()}, "b.weight": SLOPES["b.weight"]}
    weights = {**LAYERS, "b.weight": torch.zeros(1, 2)}
    pruned = {name: weights[name] for name in slopes}
    answer = snip(pruned, slopes) if isinstance(method, SSFL) else slopes
    with pytest.raises(InvalidOption, match="is 0 or has a gradient of 0, so that no score tells them apart"):
        method.init(weights, fleet(buffers=["norm.mean"], survey=lambda _: Merged(weights=answer, covered={})))


@pytest.mark.parametrize("density", [0, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=r"`algorithm.density` is .*; expected a number in \(0, 1\]"):
        SNIP(density=density)


def test_an_unknown_choice_is_refused():
    with pytest.raises(InvalidOption, match=r"`algorithm.scored_by` is 'two'; expected one of 'all', 'one'"):
        SNIP(scored_by="two")


def test_the_largest_products_stay(pruned):
    # |w g|: a 5 2 3 0, b .1 .2; half of six weights are three
    state, (message,) = pruned(SNIP(density=0.5))
    assert {n: m.tolist() for n, m in state.masks.items()} == {
        "a.weight": [[True, False], [True, False]],
        "b.weight": [[False, True]],
    }
    assert state.weights["a.weight"].tolist() == [[1, 0], [3, 0]]
    assert torch.equal(state.weights["a.bias"], LAYERS["a.bias"])
    assert torch.equal(state.weights["norm.mean"], LAYERS["norm.mean"])
    assert message == Message(weights={})  # everybody has the initial weights


def test_every_layer_keeps_a_weight(pruned):
    state, _ = pruned(SNIP(density=2 / 6))
    assert [int(mask.sum()) for mask in state.masks.values()] == [1, 1]


def test_a_density_too_small_for_the_layers_is_refused(pruned):
    with pytest.raises(
        InvalidOption, match=r"`algorithm\.density` is 0\.1; expected .* that leaves each of the 2 layers"
    ):
        pruned(SNIP(density=0.1))


def test_dense_layers_are_not_pruned(pruned):
    state, _ = pruned(SNIP(density=0.5, dense_layers=("b.*",)))
    assert list(state.masks) == ["a.weight"]
    with pytest.raises(InvalidOption, match=r"The pattern 'c\.\*' matches no layer, expected one for `a.weight`"):
        pruned(SNIP(density=0.5, dense_layers=("c.*",)))
    with pytest.raises(InvalidOption, match=r"leave no layer to prune, among `a.weight`, `b.weight`"):
        pruned(SNIP(dense_layers=("*",)))


def test_one_client_or_all_answer(client, pruned):
    someone, script = client(slopes=SLOPES, client=2)
    _, (to_all,) = pruned(SNIP(density=0.5))
    update = SNIP().survey(to_all, someone)
    assert (update.weights, update.weight, script.gradients) == (SLOPES, 7, [{}])
    method = SNIP(density=0.5, scored_by="one")
    _, (to_one,) = pruned(method)
    assert method.survey(to_one, someone).weights == {}
    assert method.survey(to_one, client(slopes=SLOPES, client=0)[0]).weights == SLOPES


def test_costs_follow_the_density(facts):
    # layer a keeps 4 of 10: 22 FLOPs instead of 34, and 12 of 18 numbers travel
    costs = SNIP().costs(facts({"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}))
    assert costs.flops_paper == costs.flops_analytic == 14 * 3 * 22
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * 12


def test_a_density_of_1_is_fedavg(federation, last):
    dense, plain = (last(federation(method, folder=name)) for name, method in (("a", SNIP(density=1)), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]


@pytest.mark.slow
def test_dead_weights_stay_zero(federation):
    trainer = federation(SNIP(density=0.3))
    server = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {n: w for n, w in server["state_dict"].items() if n in ("net.0.weight", "net.4.weight")}
    assert sum(int((w != 0).sum()) for w in weights.values()) == round(0.3 * 192)
