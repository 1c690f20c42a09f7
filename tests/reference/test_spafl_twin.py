"""SpaFL against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SpaFL
from reference import numpy_spafl as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, compare, moved

NAMES = ["net.0.weight", "net.2.weight", "net.4.weight"]


def off(done):
    """Units of clients' models whose weights are all 0."""
    return sum(int((~done.scored_with[k][name].any(1)).sum()) for k in CLIENTS for name in NAMES)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(CLIPPED, 4), (HEAVY, 64), (PLAIN, 4)])
@pytest.mark.parametrize("strength", [0.1, 0.002])
def test_spafl(fit, strength, sgd, batch_size):
    initial, record = fit(SpaFL(strength=strength), sgd, batch_size)
    twin = slow.SpaFL(initial, sgd, NAMES, strength=strength)
    compare(record, twin, batch_size, common=False)
    assert not moved(record, initial)  # the server's weights, which are nobody's
    assert max(np.abs(tau).max() for tau in twin.history[-1].values()) > 1e-3
    assert (off(record[-1]) > 0) == (strength == 0.1)


@pytest.mark.slow
def test_spafl_over_the_wire_and_in_a_real_trainer(fit):
    initial, record = fit(SpaFL(strength=0.1), CLIPPED, 4, 3, wire="encode", local_engine="trainer")
    compare(record, slow.SpaFL(initial, CLIPPED, NAMES, strength=0.1), 4, common=False)
