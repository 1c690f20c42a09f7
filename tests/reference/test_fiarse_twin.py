"""FIARSE against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FIARSE
from reference import numpy_fiarse as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, compare, moved

LEVELS = [1.0, 0.5, 0.2]
NAMES = ["net.0.weight", "net.2.weight", "net.4.weight"]


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(CLIPPED, 4), (HEAVY, 64), (PLAIN, 4)])
@pytest.mark.parametrize("options", [{}, {"scope": "layer"}, {"boost": False}], ids=str)
def test_fiarse(fit, options, sgd, batch_size):
    initial, record = fit(FIARSE(**options), sgd, batch_size, capacities=LEVELS)
    twin = slow.FIARSE(initial, sgd, {k: LEVELS[k // 2] for k in CLIENTS}, NAMES, **options)
    compare(record, twin, batch_size)
    assert moved(record, initial)
    assert twin.fallen > 0  # some weights fell below the threshold in training


@pytest.mark.slow
def test_fiarse_over_the_wire_and_in_a_real_trainer(fit):
    initial, record = fit(FIARSE(), CLIPPED, 4, 3, capacities=LEVELS, wire="encode", local_engine="trainer")
    compare(record, slow.FIARSE(initial, CLIPPED, {k: LEVELS[k // 2] for k in CLIENTS}, NAMES), 4)
