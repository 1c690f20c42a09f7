"""FedPer against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FedPer
from reference import numpy_fedper as slow
from reference.harness import CLIPPED, HEAVY, PER_ROUND, PLAIN, SIZES, compare, moved, tensors


@pytest.mark.slow_after_first
@pytest.mark.filterwarnings("ignore:Clients keep the whole model")
@pytest.mark.parametrize(
    ("own", "layers", "sgd", "batch_size"),
    [
        (("head",), ["net.4"], PLAIN, 64),
        (("head", "net.0"), ["net.0", "net.4"], HEAVY, 4),
        (("net.[24].*",), ["net.2", "net.4"], CLIPPED, 4),
        (("*",), ["net.0", "net.2", "net.4"], PLAIN, 4),
    ],
)
def test_fedper(fit, own, layers, sgd, batch_size):
    initial, record = fit(FedPer(own=own), sgd, batch_size)
    twin = slow.FedPer(initial, tensors(layers), SIZES, sgd)
    compare(record, twin, batch_size)
    assert len(twin.kept) > PER_ROUND
    assert moved(record, initial) == (len(layers) < 3)  # with nothing to share, the server's weights stay
