from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import SSFL, FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Merged, Message

LAYERS = {
    "a.weight": torch.tensor([[1.0, -2.0], [3.0, 4.0]]),
    "a.bias": torch.ones(2),
    "b.weight": torch.tensor([[1.0, 1.0]]),
    "norm.mean": torch.ones(2, 2),
}
SCORES = {"a.weight": torch.tensor([[5.0, 2.0], [3.0, 0.0]]), "b.weight": torch.tensor([[0.1, 0.2]])}


@pytest.fixture
def pruned(fleet):
    """The state of a method before round 0, whose clients answer with `SCORES` in the mean."""
    asked = []

    def survey(message):
        asked.append(message)
        return Merged(weights=LAYERS | SCORES, covered={})  # the engine's merge adds what no client has sent

    def start(method):
        state = method.init(LAYERS, fleet(buffers=["norm.mean"], survey=survey))
        assert asked == [Message(weights={})]  # everybody has the initial weights
        return state

    start.asked = asked
    return start


@pytest.mark.parametrize("density", [0, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=r"`algorithm.density` is .*; expected a number in \(0, 1\]"):
        SSFL(density=density)


def test_the_largest_mean_scores_stay(pruned):
    state = pruned(SSFL(density=0.5))
    assert {n: m.tolist() for n, m in state.masks.items()} == {
        "a.weight": [[True, False], [True, False]],
        "b.weight": [[False, True]],
    }
    assert state.weights["a.weight"].tolist() == [[1, 0], [3, 0]]
    assert torch.equal(state.weights["a.bias"], LAYERS["a.bias"])
    assert torch.equal(state.weights["norm.mean"], LAYERS["norm.mean"])


def test_a_density_too_small_for_the_layers_is_refused(pruned):
    expected = r"`algorithm\.density` is 0\.1; expected .* that leaves each of the 2 layers"
    with pytest.raises(InvalidOption, match=expected):
        pruned(SSFL(density=0.1))


def test_a_pattern_without_a_layer_is_refused_before_clients_are_asked(pruned):
    with pytest.raises(InvalidOption, match=r"The pattern 'c\.\*' matches no layer, expected one for `a.weight`"):
        pruned(SSFL(dense_layers=("c.*",)))
    assert pruned.asked == []


def test_a_client_sends_the_scores_of_what_is_pruned(client):
    slopes = {**LAYERS, "a.weight": torch.tensor([[5.0, 1.0], [-1.0, 0.0]]), "b.weight": torch.tensor([[0.5, -2.0]])}
    someone, script = client(slopes=slopes, initial=LAYERS, buffers=("norm.mean",))
    update = SSFL().survey(Message(weights={}), someone)
    assert {name: score.tolist() for name, score in update.weights.items()} == {
        "a.weight": [[5, 2], [3, 0]],
        "b.weight": [[0.5, 2]],
    }
    assert (update.weight, script.gradients) == (7, [{}])
    assert list(SSFL(dense_layers=("b.*",)).survey(Message(weights={}), someone).weights) == ["a.weight"]


def test_a_density_of_1_is_fedavg(federation, last):
    dense, plain = (last(federation(method, folder=name)) for name, method in (("a", SSFL(density=1)), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]
