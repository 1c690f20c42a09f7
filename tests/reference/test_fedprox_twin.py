"""FedProx against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FedProx
from reference import numpy_fedprox as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, SIZES, compare, moved


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (CLIPPED, 64), (HEAVY, 4)])
def test_fedprox(fit, sgd, batch_size):
    initial, record = fit(FedProx(mu=0.5), sgd, batch_size)
    compare(record, slow.FedProx(initial, SIZES, sgd, mu=0.5), batch_size)
    assert moved(record, initial)
