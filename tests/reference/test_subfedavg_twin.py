"""Sub-FedAvg against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SubFedAvg
from reference import numpy_subfedavg as slow
from reference.harness import (
    CLIENTS,
    CLIPPED,
    EPOCHS,
    HEAVY,
    HELD_OUT,
    PLAIN,
    SIZES,
    ClientData,
    agree,
    full_batches,
    moved,
    samples,
    seen_batches,
)


def scored_on(gate):
    """The samples of each client that its gate reads."""
    if gate == "train":
        return {k: samples(np.arange(SIZES[k]) + 100 * k) for k in CLIENTS}
    return {k: (ClientData(k, 1).x[-HELD_OUT:], ClientData(k, 1).y[-HELD_OUT:]) for k in CLIENTS}


def same_masks(done, twin):
    for k, masks in done.masks.items():
        for name, mask in masks.items():
            assert np.array_equal(mask, twin.masks[k][name]), (k, name)


CASES = {
    "defaults": ({}, PLAIN, 64),
    "several prunings, and a short last one": ({"density": 0.72, "min_score": 0.2}, HEAVY, 4),
    "full steps": ({"density": 0.8, "min_score": 0.2, "last_step": "full", "gate": "train"}, HEAVY, 64),
    "held votes": ({"step": 0.3, "min_score": 0.2, "votes": "held"}, CLIPPED, 4),
    "a wide gate of change": ({"min_change": 0.05, "min_score": 0.2}, HEAVY, 4),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_subfedavg(fit, case):
    options, sgd, batch_size = CASES[case]
    method = SubFedAvg(**options)
    initial, record = fit(method, sgd, batch_size)
    twin = slow.SubFedAvg(
        initial,
        CLIENTS,
        sgd,
        density=method.density,
        step=method.step,
        min_change=method.min_change,
        min_score=method.min_score,
        last_step=method.last_step,
        votes=method.votes,
        epochs=EPOCHS,
    )
    own = scored_on(method.gate)
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0], own)
        agree(done, twin)
        same_masks(done, twin)
    assert moved(record, initial)
    assert twin.pruned > 0
