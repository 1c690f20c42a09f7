from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, FedProx
from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import Message


@pytest.mark.parametrize("mu", [-0.01, float("nan")])
def test_a_strength_below_0_is_refused(mu):
    with pytest.raises(InvalidOption, match=r"`algorithm.mu` is .*; expected a number >= 0"):
        FedProx(mu=mu)


@pytest.mark.parametrize("mu", [0, 0.01, 1.0])
def test_clients_are_pulled_towards_what_they_received(client, mu):
    message = Message(weights={"w": torch.tensor([1.0, 2.0])})
    someone, script = client({"w": torch.tensor([3.0, 4.0])})
    update = FedProx(mu=mu).train(message, someone)
    weights, masks, trainable, (term,) = script.fits[0]
    assert (weights, masks, trainable) == (message.weights, {}, {})
    assert isinstance(term, ProximalTerm)
    assert (term.strength, term.anchor) == (mu, message.weights)
    assert (update.weights["w"].tolist(), update.kind, update.weight) == ([3, 4], "weights", 7)


def test_the_rest_is_fedavg(facts):
    assert isinstance(FedProx().reducer(), CoverageMean)
    assert FedProx().costs(facts()) == FedAvg().costs(facts())
