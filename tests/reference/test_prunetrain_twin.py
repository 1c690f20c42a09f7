"""PruneTrain against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import PruneTrain
from reference import numpy_prunetrain as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, ROUNDS, SIZES, agree, full_batches, moved, seen_batches

CASES = {
    "units": ({}, PLAIN, 64),
    "units that die": ({"strength": 0.1, "threshold": 0.4, "reconfigure_every": 2}, HEAVY, 4),
    "units, a larger share": ({"ratio": 0.6, "threshold": 0.3}, CLIPPED, 4),
    "layers": ({"groups": "layers", "strength": 0.02}, HEAVY, 4),
    "layers, by a share": ({"groups": "layers", "density": 0.3, "initial_density": 0.8}, PLAIN, 64),
}
DYING = {"units that die", "units, a larger share"}


def compare(fit, method, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, **federation)
    twin = slow.PruneTrain(
        initial,
        dict(enumerate(SIZES)),
        sgd,
        strength=method.strength,
        ratio=method.ratio,
        groups=method.groups,
        threshold=method.threshold,
        every=method.reconfigure_every,
        densities=(method.initial_density, method.density),
        rounds=ROUNDS,
    )
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
        for name, mask in done.server_masks.items():
            assert np.array_equal(mask, twin.masks[name]), name
    assert moved(record, initial)
    return twin


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_prunetrain(fit, case):
    options, sgd, batch_size = CASES[case]
    twin = compare(fit, PruneTrain(**options), sgd, batch_size)
    dead = sum(int((~mask).sum()) for mask in twin.masks.values())
    assert (dead > 0) == (case in DYING or "layers" in case)


@pytest.mark.slow
def test_prunetrain_in_a_module_that_is_cut(fit):
    options, sgd, batch_size = CASES["units that die"]
    compare(fit, PruneTrain(**options), sgd, batch_size, execution="cut")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["layers", "units, a larger share"])
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_prunetrain_whichever_way_the_engine_goes(fit, case, option):
    options, sgd, batch_size = CASES[case]
    compare(fit, PruneTrain(**options), sgd, batch_size, **option)
