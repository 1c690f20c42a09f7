"""FLASH against its slow twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_sparsefl import FLASH
from lightning_sparsefl.seeds import derive_key, generator
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.sparse.scores import random as random_scores
from reference import numpy_flash as slow
from reference.harness import (
    CLIPPED,
    EPOCHS,
    HEAVY,
    PLAIN,
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

MATRICES = {"net.0.weight": 48, "net.2.weight": 56, "net.4.weight": 21}


def drawn(shapes, densities, purpose):
    """The package's seeded draws, of as many positions as the twin's densities say."""
    counts = {name: max(1, int(densities[name] * MATRICES[name] + 1e-6)) for name in shapes}
    return arrays(random_masks(shapes, counts, generator(SEED, purpose)))


def growth(shapes, client, number):
    key = (derive_key(SEED, "client", client), 0, "survey", "FLASH growth", number)
    return arrays(random_scores(shapes, generator(*key)))


def asked(method):
    order = torch.randperm(len(SIZES), generator=generator(SEED, "FLASH clients")).tolist()
    return order[: max(1, int(method.first_clients * len(SIZES) + 1e-6))]


def prepared(method, sgd, initial):
    """The densities of the layers that the twin finds, and the mask that they lead to."""
    shapes = pool_of(initial, "weights")
    first = drawn(shapes, dict.fromkeys(shapes, method.density), "FLASH first mask")
    found = []
    for k in asked(method):
        whole = samples(np.arange(SIZES[k]) + 100 * k)
        scores = [growth(shapes, k, number) for number in range(method.first_epochs - 1)]
        epochs = [[whole]] * method.first_epochs
        found.append(slow.hunted(initial, first, epochs, method.exchange, scores, sgd))
    densities = slow.scaled(found, MATRICES, method.density)
    return densities, drawn(shapes, densities, "FLASH mask")


def compare_flash(fit, method, sgd, **federation):
    """A run against its twin; returns the densities of the layers."""
    initial, record = fit(method, sgd, **federation)
    densities, masks = prepared(method, sgd, initial)
    twin = slow.FLASH(initial, masks, SIZES, sgd)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        assert len(done.server_masks) == 3
    assert moved(record, initial)
    ours = {int(numbers[0]) // 100 for _, numbers in record[0].trained_on[: len(asked(method)) * method.first_epochs]}
    assert ours == set(asked(method))
    return densities


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd"),
    [
        ({"density": 0.3, "first_clients": 0.5, "first_epochs": 4}, PLAIN),
        ({"density": 0.5, "first_clients": 0.1, "first_epochs": 3, "exchange": 0.6}, HEAVY),
        ({"density": 0.85, "first_clients": 1.0, "first_epochs": 5, "exchange": 0.5}, CLIPPED),
    ],
    ids=["three", "one", "all, almost dense"],
)
def test_flash(fit, options, sgd):
    densities = compare_flash(fit, FLASH(**options), sgd)
    assert len({round(share, 3) for share in densities.values()}) > 1


def test_one_epoch_finds_equal_densities(fit):
    densities = compare_flash(fit, FLASH(density=0.5, first_epochs=1), PLAIN)
    assert max(densities.values()) - min(densities.values()) < 0.03  # by rounding down in the first mask


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_flash_whichever_way_the_engine_goes(fit, option):
    compare_flash(fit, FLASH(density=0.4, first_clients=0.5, first_epochs=3), HEAVY, **option)


def moves(shapes, client, round):
    key = (derive_key(SEED, "client", client), round, "train", "FLASH moves", 0, 1)
    return arrays(random_scores(shapes, generator(*key)))


def compare_moving(fit, method, sgd, batch_size=64, **federation):
    """A run in which masks move or differ against its twin; returns the masks of all rounds."""
    initial, record = fit(method, sgd, batch_size, **federation)
    _, masks = prepared(method, sgd, initial)
    levels = federation.get("capacities", [1.0])
    twin = slow.Moving(
        initial,
        masks,
        SIZES,
        sgd,
        density=method.density,
        exchange=method.exchange,
        every=method.move_every if method.form == "JMWST" else 0,
        epochs=EPOCHS,
        merge=method.merge,
        sensitivity=method.sensitivity,
        capacities=[levels[k * len(levels) // len(SIZES)] for k in range(len(SIZES))],
    )
    shapes = pool_of(initial, "weights")
    for t, done in enumerate(record):
        scores = {k: moves(shapes, k, t) for k in done.cohort}
        if t == 0:
            del done.trained_on[: method.first_epochs * sum(-(-SIZES[k] // batch_size) for k in asked(method))]
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0], scores)
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
    assert moved(record, initial)
    return [masks, *(done.server_masks for done in record)]


def changed(before, after):
    return any(not np.array_equal(before[name], mask) for name, mask in after.items())


@pytest.mark.slow_after_first
@pytest.mark.parametrize("merge", ["mean", "count"])
@pytest.mark.parametrize("sgd", [PLAIN, HEAVY, CLIPPED], ids=["plain", "heavy", "clipped"])
def test_jmwst(fit, merge, sgd):
    method = FLASH(form="JMWST", density=0.4, first_clients=0.3, first_epochs=3, exchange=0.5, merge=merge)
    masks = compare_moving(fit, method, sgd)
    assert all(map(changed, masks, masks[1:]))


@pytest.mark.slow_after_first
@pytest.mark.parametrize("option", [{}, {"local_engine": "trainer"}, {"wire": "encode"}], ids=["", "trainer", "encode"])
def test_jmwst_in_batches_and_in_some_rounds(fit, option):
    method = FLASH(form="JMWST", density=0.3, first_epochs=1, exchange=0.6, move_every=2)
    masks = compare_moving(fit, method, HEAVY, batch_size=4, **option)
    assert [changed(*pair) for pair in pairwise(masks)] == [True, False, True, False, True]


LEVELS = [0.5, 0.75, 1.0]


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "options",
    [
        {"merge": "count"},
        {"merge": "mean"},
        {"form": "JMWST", "merge": "count", "sensitivity": "weights"},
        {"form": "JMWST", "merge": "mean", "exchange": 0.5, "move_every": 2},
    ],
    ids=["count", "mean", "moving, count", "moving, mean"],
)
@pytest.mark.parametrize("sgd", [PLAIN, HEAVY], ids=["plain", "heavy"])
def test_parts_of_the_mask(fit, options, sgd):
    method = FLASH(hetero=True, density=0.5, first_clients=0.3, first_epochs=2, **options)
    masks = compare_moving(fit, method, sgd, batch_size=4, capacities=LEVELS)
    assert [changed(*pair) for pair in pairwise(masks)][:2] == [method.moves(0), method.moves(1)]


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_parts_of_the_mask_whichever_way_the_engine_goes(fit, option):
    compare_moving(fit, FLASH(hetero=True, density=0.5, first_epochs=2), HEAVY, 4, capacities=[0.3, 1.0], **option)
