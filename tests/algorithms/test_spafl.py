from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import SpaFL
from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.thresholds import follow, keep_rows, threshold_gradients
from lightning_sparsefl.types import CostFacts, FitResult, LayerFlops, Merged, Message

WEIGHTS = {
    "a.weight": torch.tensor([[1.0, -3.0], [0.0, 1.0], [2.0, 2.0]]),
    "a.bias": torch.ones(3),
    "conv.weight": torch.ones(4, 2, 3, 3),
    "norm.mean": torch.full((3,), 0.5),
}


def start(method, fleet):
    return method.init(WEIGHTS, fleet(buffers=["norm.mean"]))


def merged(**thresholds):
    return Merged(
        weights={name: torch.zeros_like(value) for name, value in WEIGHTS.items()},
        covered={n: torch.zeros_like(v, dtype=torch.bool) for n, v in WEIGHTS.items()},
        extra={"thresholds": {name.replace("_", "."): value for name, value in thresholds.items()}},
    )


def test_only_thresholds_travel(fleet, view):
    method = SpaFL()
    server = start(method, fleet)
    message = method.download(server, view())
    assert list(message.weights) == ["norm.mean"]
    assert {name: rows.shape for name, rows in message.extra["history"].items()} == {
        "a.weight": (1, 3),
        "conv.weight": (1, 4),
    }
    assert list(method.download_for(server, view(), "score").weights) == ["norm.mean"]


def test_only_the_named_layers_have_thresholds(fleet):
    state = start(SpaFL(layers=("conv.*",)), fleet)
    assert {name: rows.shape for name, rows in state.extra["history"].items()} == {"conv.weight": (1, 4)}


def test_a_client_receives_the_rounds_since_its_last_turn(fleet, view):
    method, server = SpaFL(), start(SpaFL(), fleet)
    for value in (1.0, 2.0, 3.0):
        server = replace(
            method.aggregate(server, merged(a_weight=torch.full((3,), value), conv_weight=torch.zeros(4))),
            round=server.round + 1,
        )
    for shared, rows in (({}, [0, 1, 2, 3]), ({"round": 0}, [0, 1, 2, 3]), ({"round": 2}, [2, 3])):
        message = method.download(server, view(round=3, shared=shared))
        assert message.extra["history"]["a.weight"][:, 0].tolist() == rows
    assert torch.equal(server.weights["a.weight"], WEIGHTS["a.weight"])
    after = method.aggregate(server, replace(merged(), extra={}))  # no client was left
    assert after.extra["history"]["a.weight"][:, 0].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(("round", "rows"), [(0, 1), (1, 2), (4, 5), (50, 6)])
def test_a_profile_sends_the_thresholds_of_the_rounds_that_a_client_misses(round, rows, fleet, view):
    method = SpaFL()
    server = method.init(WEIGHTS, fleet(clients=10, clients_per_round=2, buffers=["norm.mean"]))
    message = method.download(method.profile_state(server, round), view(round=round))
    assert {name: len(sent) for name, sent in message.extra["history"].items()} == dict.fromkeys(
        message.extra["history"], rows
    )
    assert all(bool((sent != 0).all()) == (round > 0) for sent in message.extra["history"].values())


def test_a_turn(client, fleet, view):
    method, server = SpaFL(strength=0.5), start(SpaFL(), fleet)
    message = method.download(server, view())
    someone, script = client({name: torch.zeros_like(value) for name, value in WEIGHTS.items()}, round=4)
    taus = {"a.weight": torch.tensor([1.5, 1.5, 3.0]), "conv.weight": torch.zeros(4)}

    def fit(client, weights, masks, trainable, callbacks, **options):
        script.fits.append(weights)
        callbacks[0]._theta = {name: WEIGHTS[name] for name in taus}
        callbacks[0]._thresholds = taus
        return FitResult(weights=script.trained, metrics={"loss": 1.0}, steps=1)

    someone._worker = type("Bench", (), {"fit": staticmethod(fit)})
    update = method.train(message, someone)
    assert list(script.fits[0]) == ["norm.mean"]
    assert list(update.weights) == ["norm.mean"]
    assert update.weight == 1
    assert update.extra == {"thresholds": taus}
    assert sorted(update.memory["weights"]) == ["a.bias", "a.weight", "conv.weight"]
    assert update.metrics == {"loss": 1.0, "live/a.weight": pytest.approx(1 / 3), "live/conv.weight": 1.0}
    seen = method.observe(server, view(round=4), update.metrics)
    assert seen == {"round": 4, "live": {"a.weight": pytest.approx(1 / 3), "conv.weight": 1.0}}
    trained = method.trained(message, update)
    assert trained["a.weight"].tolist() == [[1.0, -3.0], [0.0, 0.0], [0.0, 0.0]]
    someone.memory = update.memory
    method.train(message, someone)
    assert torch.equal(script.fits[1]["a.weight"], WEIGHTS["a.weight"])  # those of theta


def test_a_client_is_scored_after_the_common_changes_under_its_own_thresholds(client, fleet, view):
    history = {"a.weight": torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 2.0]])}
    message = Message(weights={"norm.mean": WEIGHTS["norm.mean"]}, extra={"history": history})
    never, _ = client(initial=WEIGHTS)  # or a node that lost its memory
    expected = [[1.5, -2.5], [0.0, 1.0], [1.0, 1.0]]  # the sum of the first row is negative
    assert SpaFL().personalize(message, never)["a.weight"].tolist() == expected
    own, _ = client(
        initial=WEIGHTS, memory={"weights": WEIGHTS, "thresholds": {"a.weight": torch.tensor([3.0, 0.1, 0.9])}}
    )
    assert SpaFL().personalize(message, own)["a.weight"].tolist() == [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def test_a_convolution_moves_by_the_places_of_its_kernel():
    moved = follow(torch.ones(1, 2, 3, 3), torch.tensor([0.9]))
    torch.testing.assert_close(moved, torch.full((1, 2, 3, 3), 0.9))
    rows = follow(torch.tensor([[[1.0, 3.0]], [[0.0, 0.0]]]), torch.tensor([1.0, 2.0]))
    assert rows.tolist() == [[[0.5, 2.5]], [[0.0, 0.0]]]


def test_the_gradients_are_those_of_autograd_with_a_step_that_is_passed():
    torch.manual_seed(0)
    weight, tau = torch.randn(5, 2, 3, requires_grad=True), torch.full((5,), 0.7, requires_grad=True)
    size = weight.flatten(1).abs().mean(1)
    soft = size - tau
    step = (size > tau).float()
    kept = weight * (step + soft - soft.detach()).view(-1, 1, 1)
    pull = torch.randn(5, 2, 3)
    (kept * pull).sum().backward()
    assert 0 < step.sum() < 5
    torch.testing.assert_close(kept, keep_rows(weight, tau))
    with torch.no_grad():
        ours = threshold_gradients(weight, pull, tau)
    torch.testing.assert_close(ours, (weight.grad, tau.grad))


def test_costs(view, fleet):
    layers = (LayerFlops("a.weight", 10, 2), LayerFlops("conv.weight", 6, 0))
    method, server = SpaFL(), start(SpaFL(), fleet)

    def costs(server=server, **shared):
        person = view(shared=shared)
        message = method.download(server, person)
        return method.costs(CostFacts(view=person, message=message, layers=layers, epochs=2, samples=7, batch_size=4))

    assert costs().flops_paper == costs().flops_analytic == 3 * 14 * 34
    later = costs(round=0, live={"a.weight": 0.5, "conv.weight": 1.0})
    assert later.flops_paper == 3 * 14 * 24
    assert later.flops_analytic == 14 * (24 + 24 + 34)
    assert later.bytes_up_paper == later.bytes_down_paper == 4 * 7
    second = method.aggregate(server, merged(a_weight=torch.ones(3), conv_weight=torch.ones(4)))
    assert costs(second).bytes_down_paper == 4 * 7  # the paper counts the thresholds of one round


def test_what_is_out_of_range_is_refused(fleet):
    with pytest.raises(InvalidOption, match=r"`algorithm.strength` is -1; expected a number >= 0"):
        SpaFL(strength=-1)
    with pytest.raises(
        InvalidOption, match=r"`algorithm.layers` is \('fc\*',\); expected patterns that each match some of"
    ):
        start(SpaFL(layers=("fc*",)), fleet)
    for layers in (("conv*", "fc*"), ()):
        with pytest.raises(InvalidOption, match=r"`algorithm.layers` is .* each match some of `a.weight`, `conv"):
            start(SpaFL(layers=layers), fleet)
    with pytest.raises(InvalidOption, match=r"`UnitThresholds\(strength=-1\)`: expected a number >= 0"):
        UnitThresholds(strength=-1)
