"""FedDyn without a federation: rounds on two quadratics, what is kept, and its edges."""

from __future__ import annotations

import pytest
import torch

from helpers.quadratics import CURVES, Descent, Exact, path, rounds
from lightning_sparsefl import FedAvg, FedDyn
from lightning_sparsefl.callbacks import GradientOffset, ProximalTerm
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Merged, Message


@pytest.mark.slow_after_first
@pytest.mark.parametrize("worker", [Exact, Descent])
def test_two_quadratics_end_at_the_minimum_of_their_mean(worker):
    workers = [worker(curve, 300, 0.1) for curve in CURVES]
    states, memories = rounds(FedDyn(alpha=1.0), workers, 60)
    assert path(states)[:2] == pytest.approx([-0.25, -0.375])
    assert path(states)[-1] == pytest.approx(-0.5)
    assert [memory["gradient"]["w"].item() for memory in memories] == pytest.approx([-1.5, 1.5])
    assert states[-1].extra["h"]["w"].item() == pytest.approx(0.0, abs=1e-7)


def test_the_first_round_has_no_linear_term(client):
    message = Message(weights={"w": torch.zeros(2)})
    someone, script = client({"w": torch.ones(2)})
    update = FedDyn(alpha=0.5).train(message, someone)
    (term,) = script.fits[0][3]
    assert isinstance(term, ProximalTerm)
    assert (term.strength, term.anchor) == (0.5, message.weights)
    assert update.memory["gradient"]["w"].tolist() == [-0.5, -0.5]
    assert (update.weight, update.kind) == (1, "weights")


def test_later_rounds_subtract_what_the_client_kept(client):
    message = Message(weights={"w": torch.zeros(2)})
    someone, script = client({"w": torch.ones(2)}, memory={"gradient": {"w": torch.tensor([1.0, 2.0])}})
    update = FedDyn(alpha=0.5).train(message, someone)
    offset, _ = script.fits[0][3]
    assert isinstance(offset, GradientOffset)
    assert offset.offset["w"].tolist() == [-1.0, -2.0]
    assert update.memory["gradient"]["w"].tolist() == [0.5, 1.5]


def test_a_client_keeps_no_estimate_for_buffers(client):
    message = Message(weights={"w": torch.zeros(2), "mean": torch.zeros(2)})
    someone, _ = client({"w": torch.ones(2), "mean": torch.ones(2)}, buffers=["mean"])
    assert set(FedDyn().train(message, someone).memory["gradient"]) == {"w"}


def test_h_moves_by_the_voters_of_a_coordinate(fleet):
    weights = {"w": torch.tensor([1.0, -2.0, 5.0]), "b": torch.zeros(1), "mean": torch.zeros(1)}
    method = FedDyn(alpha=0.5)
    server = method.init(weights, fleet(clients=8, buffers=["mean"]))
    merged = Merged(
        weights={"w": torch.tensor([2.0, -1.0, 5.0]), "b": torch.ones(1), "mean": torch.ones(1)},
        covered={"w": torch.tensor([True, True, False])},
        voters={"w": torch.tensor([4, 2, 0], dtype=torch.int32)},
        reports={number: {} for number in range(4)},
    )
    new = method.aggregate(server, merged)
    assert new.extra["h"]["w"].tolist() == [-0.25, -0.125, 0.0]
    assert new.weights["w"].tolist() == [2.5, -0.75, 5.0]
    assert (new.extra["h"]["b"].item(), new.weights["b"].item()) == (-0.25, 1.5)
    assert (list(new.extra["h"]), new.weights["mean"].item()) == (["w", "b"], 1.0)


def test_costs_are_those_of_fedavg(facts):
    assert FedDyn().costs(facts()) == FedAvg().costs(facts())


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan")])
def test_a_strength_of_0_or_less_is_refused(alpha):
    with pytest.raises(InvalidOption, match=r"`algorithm.alpha` is .*; expected a number above 0"):
        FedDyn(alpha=alpha)
