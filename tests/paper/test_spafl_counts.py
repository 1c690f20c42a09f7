"""Thresholds and traffic of SpaFL's networks (arXiv:2406.00431, Table 1)."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import SpaFL
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.models import LeNet5, ResNet18
from lightning_sparsefl.types import ClientView, CostFacts


@pytest.mark.parametrize(
    ("network", "layers", "thresholds", "rounds", "gigabits"),
    [
        (lambda: LeNet5(num_classes=10), ("*",), 580, 500, 0.1856),
        (lambda: ResNet18(num_classes=100, norm="group"), ("*conv*", "*shortcut*"), 4800, 1500, 4.608),
    ],
    ids=["LeNet-5", "ResNet-18"],
)
def test_only_thresholds_travel(network, layers, thresholds, rounds, gigabits):
    """Both directions, of ten clients a round; of ResNet-18 those of its convolutions."""
    view = ClientView(id=0, num_examples=1, capacity=1.0, round=0, max_rounds=rounds, seed=0)
    weights = {name: value.detach() for name, value in network().named_parameters()}
    method = SpaFL(layers=layers)
    message = method.download(method.init(weights, Fleet([view], frozenset(), torch.device("cpu"))), view)
    costs = method.costs(CostFacts(view=view, message=message, layers=(), epochs=1, samples=1, batch_size=1))
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * thresholds
    sent = costs.bytes_down_paper + costs.bytes_up_paper
    assert 8 * 10 * rounds * sent / 1e9 == pytest.approx(gigabits)
