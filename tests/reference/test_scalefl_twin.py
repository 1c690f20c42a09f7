"""ScaleFL against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import ScaleFL
from reference import exits, harness
from reference import numpy_scalefl as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, ROUNDS, SIZES, compare, moved

CAPACITIES = [0.3, 0.7, 1.0]
DEPTHS = [1, 1, 2, 2, 3, 3]
"""Of three blocks."""
WIDTHS = (0.5, 0.7, 1.0)


@pytest.fixture(autouse=True)
def with_exits(monkeypatch):
    monkeypatch.setattr(harness, "Net", exits.Exits)
    monkeypatch.setattr(harness, "loss", exits.loss)


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
