"""FedDyn against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FedDyn
from reference import numpy_feddyn as slow
from reference.harness import HEAVY, PLAIN, SIZES, close, compare, moved


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size", "alpha"), [(HEAVY, 64, 0.1), (PLAIN, 64, 0.5), (HEAVY, 4, 0.2)])
def test_feddyn(fit, sgd, batch_size, alpha):
    initial, record = fit(FedDyn(alpha=alpha), sgd, batch_size)
    twin = slow.FedDyn(initial, len(SIZES), sgd, alpha)
    compare(record, twin, batch_size)
    for client, memory in record[-1].memory.items():
        close({name: value.numpy() for name, value in memory["gradient"].items()}, twin.g[client])
    assert moved(record, initial)
