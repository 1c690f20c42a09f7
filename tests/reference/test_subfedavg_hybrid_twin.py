"""Sub-FedAvg's hybrid form against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SubFedAvg
from reference import numpy_subfedavg_hybrid as slow
from reference.harness import CLIENTS, CLIPPED, EPOCHS, HEAVY, PLAIN, SIZES, full_batches, moved
from reference.test_fedbn_twin import COUNTER, close
from reference.test_subfedavg_twin import same_masks, scored_on

HYBRID = {"channels": True, "density": 0.5, "min_change": 5e-4, "min_score": 0.2}
CASES = {
    "the authors' options": (HYBRID, PLAIN, {}),
    "few channels, a strong penalty": (HYBRID | {"min_channels": (1,), "penalty": 0.02}, HEAVY, {}),
    "a short last pruning": (HYBRID | {"density": 0.75, "step": 0.3, "min_channels": (4,)}, CLIPPED, {}),
    "a cut module": (
        HYBRID | {"min_channels": (1,), "penalty": 0.01, "channel_step": 0.2},
        HEAVY,
        {"execution": "cut"},
    ),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_subfedavg_with_channels(fit, case):
    options, sgd, federation = CASES[case]
    method = SubFedAvg(**options)
    initial, record = fit(method, sgd, norm=True, rounds=8, **federation)
    del initial[COUNTER]
    names = (
        "density",
        "step",
        "min_change",
        "min_score",
        "channel_step",
        "min_channel_change",
        "min_channels",
        "penalty",
    )
    told = {name: getattr(method, name) for name in names}
    twin = slow.SubFedAvgHybrid(initial, SIZES, sgd, told, EPOCHS)
    own = scored_on("val")
    for done in record:
        twin.round(full_batches(done.cohort)[0], own)
        close(done.weights, twin.weights)
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k))
        same_masks(done, twin)
    assert moved(record, initial)
    assert twin.pruned > 1
    assert twin.removed > 1
    widths = {int(masks[slow.SCALE].sum()) for masks in twin.masks.values()}
    assert len(widths) > 1
    assert all(np.array_equal(masks[slow.SCALE], masks["net.1.bias"]) for masks in twin.masks.values())
