"""LotteryFL against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import LotteryFL
from reference import numpy_lotteryfl as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, agree, full_batches, moved, seen_batches
from reference.test_subfedavg_twin import same_masks, scored_on

CASES = {
    "defaults": ({}, PLAIN, 64),
    "few prunings": ({"density": 0.8, "min_score": 0.0}, HEAVY, 4),
    "a higher gate": ({"step": 0.3, "min_score": 0.35, "gate": "train"}, CLIPPED, 64),
    "without rewinding": ({"rewind": False, "step": 0.2}, HEAVY, 4),
    "mean over the cohort": ({"merge": "mean", "rewind": False}, CLIPPED, 4),
    "mean over the cohort, rewound": ({"merge": "mean", "step": 0.3}, PLAIN, 4),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_lotteryfl(fit, case):
    options, sgd, batch_size = CASES[case]
    method = LotteryFL(**options)
    initial, record = fit(method, sgd, batch_size)
    twin = slow.LotteryFL(
        initial,
        CLIENTS,
        sgd,
        density=method.density,
        step=method.step,
        min_score=method.min_score,
        rewind=method.rewind,
        merge=method.merge,
    )
    own = scored_on(method.gate)
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0], own)
        agree(done, twin)
        same_masks(done, twin)
        for k, memory in done.memory.items():
            assert memory["density"] == pytest.approx(twin.densities[k], abs=1e-12)
    assert moved(record, initial)
    assert twin.pruned > 1
