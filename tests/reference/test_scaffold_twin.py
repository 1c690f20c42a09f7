"""SCAFFOLD against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SCAFFOLD
from reference import numpy_scaffold as slow
from reference.harness import HEAVY, PLAIN, SIZES, full_batches, moved, seen_batches

TOLERANCE = 1e-9


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size", "rate"), [(HEAVY, 64, 1.0), (PLAIN, 64, 0.5), (HEAVY, 4, 1.0)])
def test_scaffold(fit, sgd, batch_size, rate):
    initial, record = fit(SCAFFOLD(lr=rate), sgd, batch_size)
    twin = slow.SCAFFOLD(initial, len(SIZES), sgd, rate)
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        for name, value in done.weights.items():
            assert np.abs(value - twin.weights[name]).max() < TOLERANCE, name
        for client in done.cohort:
            for name, value in done.memory[client]["control"].items():
                assert np.abs(value.numpy() - twin.own[client][name]).max() < TOLERANCE, name
    assert moved(record, initial)
    assert max(np.abs(value).max() for value in twin.c.values()) > 0.01
