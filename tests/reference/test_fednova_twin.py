"""FedNova against its slow twin, with clients of different numbers of steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_sparsefl import FedNova
from reference import numpy_fednova as slow
from reference.harness import EPOCHS, HEAVY, PLAIN, SIZES, moved, seen_batches

TOLERANCE = 1e-7
"""The ratio of learning rates is sent in float32."""


def compare(record, twin):
    for done in record:
        twin.round(seen_batches(done)[0])
        assert len({len(batches) for batches in seen_batches(done)[0].values()}) > 1 or len(done.cohort) == 1
        for name, value in done.weights.items():
            assert np.abs(value - twin.weights[name]).max() < TOLERANCE, name


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "mu"), [(HEAVY, 0.0), (PLAIN, 0.0), (HEAVY, 0.5), (PLAIN, 0.5)])
def test_fednova(fit, sgd, mu):
    initial, record = fit(FedNova(mu=mu), sgd, 4, rounds=3)
    compare(record, slow.FedNova(initial, SIZES, sgd, mu=mu))
    assert moved(record, initial)


def test_scaled_learning_rates(fit):
    initial, record = fit(FedNova(variant="local_lr"), HEAVY, 4, rounds=3)
    compare(record, slow.LocalLR(initial, SIZES, HEAVY, [EPOCHS * math.ceil(size / 4) for size in SIZES]))
    assert moved(record, initial)
