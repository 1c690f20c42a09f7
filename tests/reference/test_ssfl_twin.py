"""SSFL against its slow twin."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_sparsefl import SNIP, SSFL
from reference import numpy_ssfl as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN
from reference.test_snip_twin import compare

compare_ssfl = partial(compare, slow.SSFL, CLIENTS)


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
