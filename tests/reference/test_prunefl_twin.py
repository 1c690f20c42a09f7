"""PruneFL against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import PruneFL
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.prune import random_masks
from reference import numpy_prunefl as slow
from reference.harness import (
    CLIPPED,
    HEAVY,
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

SECONDS = {"net.0.weight": 1.0, "net.2.weight": 3.0, "net.4.weight": 0.5}


def schedule(method, rounds):
    if method.criterion == "cubic":
        start, end = method.initial_density, method.density
        return [end + (start - end) * (1 - t / rounds) ** 3 for t in range(rounds)]
    if method.criterion == "halving":
        return [1 - method.prunable * 0.5 ** (t / method.half_life) for t in range(rounds)]
    return None


def compare_prunefl(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a run against its twin; returns the numbers of kept weights."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    shapes, weights = pool_of(initial, "weights"), initial
    masks = {name: np.ones(shape, dtype=bool) for name, shape in shapes.items()}
    if method.first == "erk":
        counts = kept_counts(shapes, method.initial_density, "erk")
        masks = arrays(random_masks(shapes, counts, generator(SEED, "PruneFL mask")))
    if method.first == "client":
        largest = max(range(len(SIZES)), key=lambda k: SIZES[k])
        whole = samples(np.arange(SIZES[largest]) + 100 * largest)
        if method.criterion == "cubic":
            weights, masks = slow.alone_at_density(initial, whole, SECONDS, method.initial_density, sgd)
        else:
            weights, masks = slow.alone(initial, whole, SECONDS, method.prunable, sgd)
    twin = slow.PruneFL(
        weights,
        masks,
        SIZES,
        sgd,
        every=method.reconfigure_every,
        fractions=[method.prunable * 0.5 ** (t / method.half_life) for t in range(rounds)],
        shares=schedule(method, rounds),
        seconds=SECONDS,
        constant=method.constant,
    )
    kept = [sum(int(mask.sum()) for mask in twin.masks.values())]
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        kept.append(sum(int(mask.sum()) for mask in done.server_masks.values()))
        for k, squares in twin.squares.items():
            assert all(np.allclose(value, squares[n], atol=1e-9) for n, value in done.memory[k]["squares"].items())
    assert moved(record, initial)
    return kept


FIRST = {"first": "client", "first_epochs": 1, "first_accuracy": 0.0}
BY_TIME = {"first": "erk", "reconfigure_every": 2, "prunable": 0.4, "seconds_per_weight": SECONDS}
CASES = {
    "by time": ({**BY_TIME, "half_life": 3.0, "constant": 20.0}, PLAIN, 4),
    "every round": ({**BY_TIME, "first": "dense", "reconfigure_every": 1}, HEAVY, 64),
    "cubic": ({**BY_TIME, "criterion": "cubic", "density": 0.3, "initial_density": 0.9}, CLIPPED, 4),
    "halving": ({**BY_TIME, "criterion": "halving", "half_life": 1.0}, PLAIN, 64),
    "one client first": ({**BY_TIME, **FIRST}, PLAIN, 64),
    "one client first, cubic": ({**BY_TIME, **FIRST, "criterion": "cubic", "initial_density": 0.6}, PLAIN, 64),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_prunefl(fit, case):
    options, sgd, batch_size = CASES[case]
    kept = compare_prunefl(fit, PruneFL(**options), sgd, batch_size)
    assert len(set(kept)) > 1 or case == "one client first"
    assert not case.startswith("one client first") or kept[0] < sum(np.prod(s) for s in ((8, 6), (7, 8), (3, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_prunefl_whichever_way_the_engine_goes(fit, option):
    compare_prunefl(fit, PruneFL(**BY_TIME), HEAVY, 4, rounds=4, **option)
