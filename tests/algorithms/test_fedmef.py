from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, FedMef
from lightning_sparsefl.callbacks import ActivationPruning, BudgetAwareExtrusion
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.types import Merged, Message, ServerState

LAYERS = {
    "a.weight": torch.arange(-24.0, 24).reshape(8, 6),
    "a.bias": torch.ones(8),
    "b.weight": torch.arange(24.0).reshape(3, 8),
    "mean": torch.ones(8),
}
MASK = torch.tensor([[True, True, True, True, False, False, False, False]])
WEIGHTS = {"w": torch.tensor([[0.4, -0.1, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0]]), "bias": torch.tensor([1.0])}
SLOPES = {"w": torch.tensor([[9.0, 9.0, 9.0, 9.0, 1.0, -3.0, 2.0, 0.0]]), "bias": torch.tensor([99.0])}
MESSAGE = Message(weights=WEIGHTS, masks={"w": MASK})


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("density", 0, r"a number in \(0, 1\]"),
        ("exchange", 1.1, r"a number in \[0, 1\]"),
        ("penalized", -0.1, r"a number in \[0, 1\]"),
        ("penalty", -1, "a number >= 0"),
        ("psi", -1, "a number >= 0"),
        ("max_lr", 0, "a number above 0"),
        ("adjust_every", 0, "a whole number >= 1"),
        ("adjust_until", 0, "a whole number >= 1"),
        ("activation_density", 0, r"a number in \(0, 1\], or null"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is {value}; expected {expected}"):
        FedMef(**{option: value})


def test_the_first_mask_keeps_the_largest_weights(fleet):
    state = FedMef(density=0.5).init(LAYERS, fleet(buffers=["mean"]))
    shapes = {name: LAYERS[name].shape for name in ("a.weight", "b.weight")}
    counts = kept_counts(shapes, erk(shapes, 0.5))
    assert {n: int(m.sum()) for n, m in state.masks.items()} == counts
    assert state.masks["b.weight"].flatten()[-counts["b.weight"] :].all()


def test_the_rate_of_an_adjustment():
    # a_t = .1 (1 + cos(pi t / 300)): .2 at 0, .1 at 150, 0 at 300
    assert [cosine(0.2, t, 301) for t in (0, 150, 300)] == pytest.approx([0.2, 0.1, 0.0])
    method = FedMef()
    assert method.rate(150) == pytest.approx(0.1)
    assert [t for t in range(40) if method.rate(t)] == [10, 20, 30]
    assert not any(method.rate(t) for t in (0, 300, 310))


def test_the_penalized_share_falls_to_0_in_the_last_round_with_an_adjustment(client):
    method = FedMef()
    assert [method.share(t) for t in (0, 150, 300, 450, 600)] == pytest.approx([0.5, 0.25, 0.0, 0.0, 0.0])
    (penalty,) = method.callbacks(MESSAGE, client(round=150)[0])
    assert penalty.share == pytest.approx(0.25)


def test_a_client_sends_the_largest_gradients_of_pruned_weights(client):
    someone, script = client(WEIGHTS, SLOPES, round=2)
    method = FedMef(exchange=0.6, adjust_every=1, adjust_until=8)
    update = method.train(MESSAGE, someone)  # .6 / 2 (1 + cos(pi / 4)) = .51 of 4 weights: two
    assert script.gradients == [WEIGHTS]
    assert update.extra["growth"]["w"].tolist() == [[0, 0, 0, 0, 0, -3, 2, 0]]
    assert list(update.extra["growth"]) == ["w"]
    first, script = client(WEIGHTS, SLOPES, round=0)
    assert method.train(MESSAGE, first).extra == {}
    assert script.gradients == []


def test_the_server_exchanges_the_smallest_weights(client):
    state = ServerState(2, WEIGHTS, {"w": MASK})
    growth = {"w": torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.5, -3.0, 0.0, 1.0]])}
    method = FedMef(exchange=0.6, adjust_every=1, adjust_until=8)
    new = method.aggregate(state, Merged(weights=WEIGHTS, covered={}, extra={"growth": growth}))
    assert new.masks["w"].tolist() == [[True, False, True, False, False, True, False, True]]
    torch.testing.assert_close(new.weights["w"], torch.tensor([[0.4, 0, 0.3, 0, 0, 0, 0, 0]]))
    assert same(method.aggregate(state, Merged(weights=WEIGHTS, covered={})).masks, {"w": MASK})
    # with fewer gradients than places a dropped weight returns, as a zero
    alone = {"w": torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, -3.0, 0.0, 0.0]])}
    new = method.aggregate(state, Merged(weights=WEIGHTS, covered={}, extra={"growth": alone}))
    assert new.masks["w"].tolist() == [[True, True, True, False, False, True, False, False]]
    assert new.weights["w"][0, 1] == 0


def test_fedtiny_has_no_callbacks(client):
    someone, _ = client()
    assert FedMef(penalty=0).callbacks(MESSAGE, someone) == []
    penalty, activations = FedMef(penalized=0.3, activation_density=0.5).callbacks(MESSAGE, someone)
    assert isinstance(penalty, BudgetAwareExtrusion)
    assert (penalty.strength, penalty.share, penalty.psi, penalty.max_lr) == (0.01, 0.3, 1.0, 0.1)
    assert same(penalty.masks, {"w": MASK})
    assert isinstance(activations, ActivationPruning)
    assert activations.density == 0.5


SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


def test_costs(facts):
    # layer a keeps 4 of 10 and exchanges 2: 8 bytes each; 22 FLOPs instead of 34, and 12 of 18 numbers travel
    method = FedMef(exchange=0.6, adjust_every=2, adjust_until=8)
    due, after, plain = (method.costs(facts(SPARSE, round=t)) for t in (2, 3, 1))
    assert plain.flops_paper == plain.flops_analytic == due.flops_paper == 14 * 3 * 22
    assert due.flops_analytic == 14 * 3 * 22 + 4 * 3 * 34
    assert (plain.bytes_down_paper, plain.bytes_up_paper) == (48, 48)
    assert (due.bytes_down_paper, due.bytes_up_paper) == (48, 48 + 2 * 8)
    assert (after.bytes_down_paper, after.bytes_up_paper) == (48 + 10 / 8, 48)


def test_a_dense_mask_without_a_penalty_is_fedavg(federation, last):
    method = FedMef(density=1, penalty=0, adjust_every=1)
    dense, plain = (last(federation(m, folder=name)) for name, m in (("a", method), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]
