"""SparsyFed against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SparsyFed
from reference import numpy_sparsyfed as slow
from reference.harness import CLIPPED, HEAVY, SIZES, compare, moved

NAMES = ["net.0.weight", "net.2.weight", "net.4.weight"]
FAST = {"lr": 0.5}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(CLIPPED, 4), (HEAVY, 64), (FAST, 4)])
@pytest.mark.parametrize(
    "options",
    [{"density": 0.4}, {"density": 0.5, "prune_activations": False}, {"density": 0.6, "exponent": 1.0}],
    ids=str,
)
def test_sparsyfed(fit, options, sgd, batch_size):
    initial, record = fit(SparsyFed(**options), sgd, batch_size)
    twin = slow.SparsyFed(initial, sgd, SIZES, NAMES, **options)
    compare(record, twin, batch_size)
    assert moved(record, initial)
    zeros = {name: record[-1].weights[name] == 0 for name in NAMES}
    assert any(zero.any() for zero in zeros.values())
    assert all(np.array_equal(zero, twin.theta[name] == 0) for name, zero in zeros.items())


@pytest.mark.slow
def test_sparsyfed_over_the_wire_and_in_a_real_trainer(fit):
    initial, record = fit(SparsyFed(density=0.4), CLIPPED, 4, 3, wire="encode", local_engine="trainer")
    compare(record, slow.SparsyFed(initial, CLIPPED, SIZES, NAMES, density=0.4), 4)
