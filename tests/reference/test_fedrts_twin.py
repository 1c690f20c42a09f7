"""FedRTS against its slow twin, which gets the package's draws for its own distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedRTS
from lightning_sparsefl.seeds import derive_seed
from lightning_sparsefl.sparse.adjust import beta_draws
from reference import numpy_fedrts as slow
from reference.harness import (
    CLIPPED,
    HEAVY,
    PER_ROUND,
    PLAIN,
    ROUNDS,
    SEED,
    SIZES,
    agree,
    arrays,
    full_batches,
    moved,
    pool_of,
    seen_batches,
)
from reference.numpy_masks import kept_counts


def draw(alpha, beta, t):
    trees = [{name: torch.from_numpy(value).float() for name, value in tree.items()} for tree in (alpha, beta)]
    return arrays(beta_draws(*trees, derive_seed(SEED, t, "FedRTS mask")))


def compare_fedrts(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a run against its twin; returns whether the mask has changed."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    counts = kept_counts(pool_of(initial, "weights"), method.density, "erk")
    twin = slow.FedRTS(
        initial,
        counts,
        SIZES,
        sgd,
        exchange=method.exchange,
        every=method.adjust_every,
        end=method.adjust_until,
        trust=method.trust,
        evidence=method.evidence,
        draw=draw,
    )
    first = dict(twin.masks)
    for t, done in enumerate(record):
        batches, search = seen_batches(done)
        assert len(search) == (PER_ROUND if method.adjusts(t) else 0)
        if batch_size == 64:
            batches, _ = full_batches(done.cohort)
        twin.round(batches, search)
        agree(done, twin)
        assert {name: int(mask.sum()) for name, mask in done.server_masks.items()} == counts
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
    assert moved(record, initial)
    return any(not np.array_equal(first[name], mask) for name, mask in twin.masks.items())


DRAWING = {"density": 0.5, "exchange": 0.6, "adjust_every": 1, "adjust_until": 8}
CASES = {
    "every round": ({}, PLAIN, 4),
    "seldom": ({"adjust_every": 2, "adjust_until": 3, "density": 0.3}, HEAVY, 64),
    "clients alone": ({"trust": 1.0, "evidence": 2.0}, CLIPPED, 4),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_fedrts(fit, case):
    options, sgd, batch_size = CASES[case]
    assert compare_fedrts(fit, FedRTS(**{**DRAWING, **options}), sgd, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_fedrts_whichever_way_the_engine_goes(fit, option):
    compare_fedrts(fit, FedRTS(**DRAWING), HEAVY, 4, rounds=3, **option)
