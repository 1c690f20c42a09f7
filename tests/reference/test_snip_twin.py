"""SNIP against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import SNIP
from reference import numpy_snip as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, SIZES, agree, full_batches, moved, seen_batches


def compare(twin_of, answers, fit, method, sgd, batch_size, **federation):
    """A run under one mask from the answers of some clients against its twin; returns the rounds."""
    initial, record = fit(method, sgd, batch_size, **federation)
    _, asked = seen_batches(record[0])
    assert set(asked) == set(answers)
    twin = twin_of(initial, asked, SIZES, sgd, method.density)
    for done in record:
        batches, searches = seen_batches(done)
        assert done is record[0] or not searches
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else batches)
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        assert len(done.server_masks) == 3
    assert moved(record, initial)
    return record


def compare_snip(fit, method, sgd, batch_size, **federation):
    answers = {0} if method.scored_by == "one" else CLIENTS
    compare(slow.SNIP, answers, fit, method, sgd, batch_size, **federation)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [({}, PLAIN, 4), ({"density": 0.2}, CLIPPED, 64), ({"scored_by": "one"}, HEAVY, 4)],
    ids=["all", "sparse", "one"],
)
def test_snip(fit, options, sgd, batch_size):
    compare_snip(fit, SNIP(**{"density": 0.5, **options}), sgd, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_snip_whichever_way_the_engine_goes(fit, option):
    compare_snip(fit, SNIP(density=0.4), HEAVY, 4, **option)
