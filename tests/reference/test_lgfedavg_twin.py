"""LG-FedAvg against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import LGFedAvg
from reference import numpy_lgfedavg as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PER_ROUND, PLAIN, compare, moved, tensors


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("layers", "sgd", "batch_size"),
    [(["net.2", "net.4"], PLAIN, 64), (["net.4"], HEAVY, 4), (["net.0", "net.2", "net.4"], CLIPPED, 4)],
)
def test_lgfedavg(fit, layers, sgd, batch_size):
    initial, record = fit(LGFedAvg(layers_shared=len(layers)), sgd, batch_size)
    twin = slow.LGFedAvg(initial, tensors(layers), CLIENTS, sgd)
    compare(record, twin, batch_size)
    assert len(twin.kept) > PER_ROUND
    assert moved(record, initial)
