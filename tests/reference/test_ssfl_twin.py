"""SSFL against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SNIP, SSFL
from reference import numpy_ssfl as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, SIZES, agree, full_batches, moved, seen_batches


def compare_ssfl(fit, method, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, **federation)
    _, asked = seen_batches(record[0])
    assert set(asked) == set(CLIENTS)
    twin = slow.SSFL(initial, asked, SIZES, sgd, method.density)
    for done in record:
        batches, searches = seen_batches(done)
        assert done is record[0] or not searches
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else batches)
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        assert len(done.server_masks) == 3
    assert moved(record, initial)
    return record


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("density", "sgd", "batch_size"), [(0.5, PLAIN, 4), (0.2, CLIPPED, 64), (0.4, HEAVY, 4)], ids=str
)
def test_ssfl(fit, density, sgd, batch_size):
    compare_ssfl(fit, SSFL(density=density), sgd, batch_size)


def test_another_mask_than_that_of_the_mean_gradient(fit):
    record = compare_ssfl(fit, SSFL(density=0.2), PLAIN, 4)
    _, other = fit(SNIP(density=0.2), PLAIN, 4)
    assert any((mask != other[0].server_masks[name]).any() for name, mask in record[0].server_masks.items())


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_ssfl_whichever_way_the_engine_goes(fit, option):
    compare_ssfl(fit, SSFL(density=0.4), HEAVY, 4, **option)
