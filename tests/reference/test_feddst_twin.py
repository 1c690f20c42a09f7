"""FedDST against its slow twin."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_sparsefl import FedDST
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.prune import random_masks
from reference import numpy_feddst as slow
from reference.harness import (
    CLIPPED,
    EPOCHS,
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
    samples,
    seen_batches,
)
from reference.numpy_masks import kept_counts


def rates(method, rounds):
    """Searches in rounds 1, 1 + R, ... before the share of the run is over."""
    last = method.search_until * rounds
    due = [t >= 1 and (t - 1) % method.search_every == 0 and t < last for t in range(rounds)]
    falls = [
        0.5 * (1 + math.cos(math.pi * t / int(last))) if method.annealing == "cosine" else 1 for t in range(rounds)
    ]
    return [method.exchange * fall if now else 0.0 for now, fall in zip(due, falls, strict=True)]


def compare_feddst(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    shapes = pool_of(initial, "weights")
    counts = kept_counts(shapes, method.density, "erk")
    if method.first == "magnitude":
        first = slow.largest_of(initial, counts)
    else:
        first = arrays(random_masks(shapes, counts, generator(SEED, "FedDST mask")))
    twin = slow.FedDST(initial, first, SIZES, sgd, rates(method, rounds), method.min_votes)
    changed = 0
    for t, done in enumerate(record):
        searching = {int(n[0]) // 100: samples(n) for training, n in done.trained_on if not training}
        assert len(searching) == (PER_ROUND if twin.rates[t] else 0)
        after = None
        if method.epochs_after_search:
            assert batch_size == 64
            after = {k: full_batches([k])[0][k] * method.epochs_after_search for k in done.cohort}
            after = {k: batches[::EPOCHS] for k, batches in after.items()}
        before = slow.copied(twin.masks)
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0], searching, after)
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        changed += any(not np.array_equal(before[name], twin.masks[name]) for name in before)
    assert moved(record, initial)
    return changed


SEARCHING = {"density": 0.5, "exchange": 0.5, "search_every": 1, "search_until": 1.0}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({}, PLAIN, 4),
        ({"annealing": "cosine", "exchange": 0.9}, CLIPPED, 64),
        ({"search_every": 2, "density": 0.3}, HEAVY, 4),
        ({"epochs_after_search": 1}, PLAIN, 64),
        ({"min_votes": 2, "epochs_after_search": 1}, HEAVY, 64),
        ({"first": "magnitude", "density": 0.4}, PLAIN, 64),
    ],
    ids=["constant", "cosine", "seldom", "trained", "two votes", "largest"],
)
def test_feddst(fit, options, sgd, batch_size):
    assert compare_feddst(fit, FedDST(**{**SEARCHING, **options}), sgd, batch_size)


@pytest.mark.slow
def test_feddst_without_an_exchange_keeps_its_mask(fit):
    assert not compare_feddst(fit, FedDST(**{**SEARCHING, "exchange": 0.0}), PLAIN, 64)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_feddst_whichever_way_the_engine_goes(fit, option):
    compare_feddst(fit, FedDST(**SEARCHING), HEAVY, 4, rounds=3, **option)
