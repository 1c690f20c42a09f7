"""ScaleFL against its slow twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl import ScaleFL
from reference import harness
from reference import numpy_scalefl as slow
from reference.harness import CLASSES, CLIPPED, FEATURES, HEAVY, PLAIN, ROUNDS, SIZES, Net, compare, moved

CAPACITIES = [0.3, 0.7, 1.0]
DEPTHS = [1, 1, 2, 2, 3, 3]
"""Of three blocks."""
WIDTHS = (0.5, 0.7, 1.0)


class Exits(Net):
    """The harness' module with an exit after each of three hidden layers."""

    def __init__(self, lr, momentum=0.0, weight_decay=0.0, clip=None, norm=False):
        super().__init__(lr, momentum, weight_decay, clip)
        del self.net
        self.first, self.one = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.second, self.two = nn.Linear(8, 7), nn.Linear(7, CLASSES)
        self.third, self.three = nn.Linear(7, 6), nn.Linear(6, CLASSES)
        self.exits, self.depth = dict(slow.BLOCKS), 3

    def logits(self, x):
        found = []
        for layer, exit in list(self.exits.items())[: self.depth]:
            x = getattr(self, layer)(x).relu()
            found.append(getattr(self, exit)(x))
        return found

    def forward(self, x):
        return torch.stack(self.logits(x)).mean(0)

    def training_step(self, batch):
        x, y, samples = batch
        self.trained_on.append((self.training, samples.numpy().copy()))
        return torch.stack([nn.functional.cross_entropy(logits, y) for logits in self.logits(x)]).mean()


@pytest.fixture(autouse=True)
def with_exits(monkeypatch):
    monkeypatch.setattr(harness, "Net", Exits)
    monkeypatch.setattr(harness, "loss", slow.loss)


@pytest.mark.slow_after_first("sgd", "execution")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("execution", ["mask", "cut"])
@pytest.mark.parametrize(
    "options",
    [{}, {"strength": 2.0, "warmup": 0.0, "temperature": 1.5}, {"strength": 0.0, "scaler": False}],
    ids=["defaults", "strong", "plain"],
)
def test_scalefl(fit, options, execution, sgd, batch_size):
    method = ScaleFL(widths=WIDTHS, **options)
    initial, record = fit(method, sgd, batch_size, capacities=CAPACITIES, execution=execution)
    compare(record, slow.ScaleFL(initial, DEPTHS, sgd, WIDTHS, ROUNDS, **options), batch_size)
    assert moved(record, initial)


def test_what_nobody_has_keeps_its_value(fit):
    method = ScaleFL(widths=(0.5, 0.6, 0.7))
    initial, record = fit(method, HEAVY, 4, capacities=[0.7], wire="encode")
    compare(record, slow.ScaleFL(initial, [2] * len(SIZES), HEAVY, method.widths, ROUNDS), 4)
    assert (record[-1].weights["third.weight"] == initial["third.weight"]).all()
