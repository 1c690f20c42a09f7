"""Complement sparsification against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import CS
from reference import numpy_cs as slow
from reference.harness import HEAVY, PLAIN, SIZES, agree, full_batches, moved


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("sgd", "options"),
    [
        (HEAVY, {}),
        (PLAIN, {"density": 0.3, "kappa": 1.0, "upload": "largest", "prune_head": True}),
        (PLAIN, {"density": 0.7, "kappa": 0.5}),
    ],
    ids=str,
)
def test_cs(fit, sgd, options):
    initial, record = fit(CS(**options), sgd)
    layers = [name for name, value in initial.items() if value.ndim == 2]
    layers = layers if options.get("prune_head") else layers[:-1]
    density, kappa = options.get("density", 0.5), options.get("kappa", 1.5)
    twin = slow.CS(initial, SIZES, sgd, layers, density, kappa, options.get("upload") == "largest")
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)
        assert done.server_masks.keys() == twin.masks.keys()
        for name, mask in twin.masks.items():
            assert np.array_equal(done.server_masks[name], mask), name
    assert moved(record, initial)
