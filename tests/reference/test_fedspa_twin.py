"""FedSpa against its slow twin."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_sparsefl import FedSpa
from lightning_sparsefl.seeds import derive_key, generator
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.sparse.scores import random as random_scores
from reference import numpy_fedspa as slow
from reference.harness import (
    CLIENTS,
    CLIPPED,
    HEAVY,
    PER_ROUND,
    PLAIN,
    ROUNDS,
    SEED,
    agree,
    arrays,
    check_cohorts,
    full_batches,
    moved,
    pool_of,
    seen_batches,
)
from reference.numpy_masks import kept_counts


def first_masks(initial, method):
    """The package's seeded draws, of as many positions as the twin's own rule says."""
    shapes = pool_of(initial, method.mask_pool)
    counts = kept_counts(shapes, method.density, method.layer_density)
    keys = [(SEED, k, "FedSpa mask") if method.mask_init == "different" else (SEED, "FedSpa mask") for k in CLIENTS]
    return {k: arrays(random_masks(shapes, counts, generator(*key))) for k, key in zip(CLIENTS, keys, strict=True)}


def growth_scores(initial, method, t, cohort):
    shapes = pool_of(initial, method.mask_pool)
    keys = {k: (derive_key(SEED, "client", k), t, "train", "growth", 0) for k in cohort}
    return {k: arrays(random_scores(shapes, generator(*keys[k]))) for k in cohort}


def compare_fedspa(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a FedSpa run against its twin; returns the twin and the rounds."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    twin = slow.FedSpa(
        initial,
        first_masks(initial, method),
        sgd,
        search=method.search,
        merge=method.merge,
        rounds=rounds,
        exchange=method.exchange,
    )
    seen = set()
    for t, done in enumerate(record):
        seen |= set(done.cohort)
        batches, search = full_batches(done.cohort) if batch_size == 64 else seen_batches(done)
        by_gradient = method.growth == "gradient"
        twin.round(batches, search, None if by_gradient else growth_scores(initial, method, t, done.cohort))
        agree(done, twin)
        dst = method.search == "dst"
        assert set(done.masks) == (seen if dst else set())
        for k, masks in done.masks.items():
            assert list(masks) == list(twin.masks[k])
            assert all(np.array_equal(mask, twin.masks[k][name]) for name, mask in masks.items())
        gradients = [numbers for training, numbers in done.trained_on if not training]
        searching = dst and by_gradient and method.exchange > 0 and t < rounds - 1
        assert len(gradients) == (PER_ROUND if searching else 0)
    assert moved(record, initial)
    return twin, record


OPTIONS = {
    "search": ("dst", "static"),
    "growth": ("gradient", "random"),
    "mask_init": ("same", "different"),
    "layer_density": ("erk", "uniform"),
    "merge": ("mean", "count"),
    "mask_pool": ("weights", "all"),
}
COMBINATIONS = [
    dict(zip(OPTIONS, values, strict=True))
    for values in itertools.product(*OPTIONS.values())
    if values[:2] != ("static", "random")  # without a search there is nothing to grow
    and sum(value != choices[0] for value, choices in zip(values, OPTIONS.values(), strict=True)) % 2 == 0
]
"""Half of all: every triple of choices stands in one of them."""
SETTINGS = [(PLAIN, 0.5, 64), (HEAVY, 0.7, 4), (CLIPPED, 0.3, 64), (CLIPPED, 0.7, 4)]
"""Training, density (at .7 ERK makes the last layer dense), batch size; they take turns over the combinations."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_fedspa(fit, number):
    sgd, density, batch_size = SETTINGS[(number + number // 4) % 4]
    method = FedSpa(density=density, **COMBINATIONS[number])
    twin, record = compare_fedspa(fit, method, sgd, batch_size)
    check_cohorts(record)
    first = first_masks(record[0].weights, method)
    changed = any(not np.array_equal(first[k][name], twin.masks[k][name]) for k in CLIENTS for name in first[k])
    assert changed == (method.search == "dst")


@pytest.mark.slow_after_first
@pytest.mark.parametrize("exchange", [0.0, 1.0])
def test_fedspa_exchanges_nothing_or_everything(fit, exchange):
    compare_fedspa(fit, FedSpa(exchange=exchange), PLAIN, 64)


def test_fedspa_of_one_round_searches_nothing(fit):
    compare_fedspa(fit, FedSpa(), PLAIN, 64, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_fedspa_whichever_way_the_engine_goes(fit, option):
    compare_fedspa(fit, FedSpa(density=0.4), HEAVY, 4, rounds=3, **option)
