"""Hermes against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import Hermes
from reference import numpy_hermes as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, agree, full_batches, moved, seen_batches
from reference.test_subfedavg_twin import scored_on

CASES = {
    "defaults": ({"min_score": 0.4}, PLAIN, 64),
    "a strong penalty": ({"min_score": 0.2, "penalty": 0.05, "step": 0.3, "density": 0.6}, HEAVY, 4),
    "scores on training data": ({"min_score": 0.4, "gate": "train"}, CLIPPED, 64),
    "the server's weights": ({"own": False, "penalty": 0.0, "min_score": 0.2}, HEAVY, 4),
    "the server's weights, with a penalty": ({"own": False, "min_score": 0.2, "density": 0.8}, CLIPPED, 4),
}


def compare(fit, method, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, **federation)
    twin = slow.Hermes(
        initial,
        CLIENTS,
        sgd,
        density=method.density,
        step=method.step,
        min_score=method.min_score,
        penalty=method.penalty,
        own=method.own,
    )
    own = scored_on(method.gate)
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0], own)
        agree(done, twin)
        for k, masks in done.masks.items():
            held = slow.masks_of(twin.units[k], initial)
            assert all(np.array_equal(mask, held[name]) for name, mask in masks.items()), k
            assert all(held[name].all() for name in held.keys() - masks.keys())
    assert moved(record, initial)
    assert twin.pruned > 1
    return twin


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_hermes(fit, case):
    options, sgd, batch_size = CASES[case]
    twin = compare(fit, Hermes(**options), sgd, batch_size)
    if twin.own:  # masks have diverged
        assert not all(mask.all() for mask in twin.common.values())


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_hermes_in_a_module_that_is_cut(fit, own):
    compare(fit, Hermes(min_score=0.2, own=own, penalty=0.02), HEAVY, 4, execution="cut")
