"""Local against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import Local
from reference import numpy_local as slow
from reference.harness import CLIPPED, PER_ROUND, PLAIN, compare, moved


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (CLIPPED, 4)])
def test_local(fit, sgd, batch_size):
    initial, record = fit(Local(), sgd, batch_size)
    twin = slow.Local(initial, sgd)
    compare(record, twin, batch_size, common=False)
    assert len(twin.own) > PER_ROUND
    assert not moved(record, initial)  # the server's weights stay
