"""FedMef against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import FedMef
from reference import numpy_fedmef as slow
from reference.harness import (
    CLIPPED,
    HEAVY,
    PER_ROUND,
    PLAIN,
    ROUNDS,
    SIZES,
    agree,
    moved,
    pool_of,
    seen_batches,
)
from reference.numpy_masks import kept_counts


def compare_fedmef(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a run against its twin; returns whether the mask has changed."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    counts = kept_counts(pool_of(initial, "weights"), method.density, "erk")
    local = {"strength": method.penalty, "share": method.penalized, "psi": method.psi, "max_lr": method.max_lr}
    local["density"] = method.activation_density
    twin = slow.FedMef(
        initial,
        counts,
        SIZES,
        sgd,
        alpha=method.exchange,
        every=method.adjust_every,
        end=method.adjust_until,
        local=local,
    )
    first = dict(twin.masks)
    for t, done in enumerate(record):
        gradients = [numbers for training, numbers in done.trained_on if not training]
        adjusting = slow.rate(method.exchange, t, method.adjust_every, method.adjust_until) > 0
        assert len(gradients) == (PER_ROUND if adjusting else 0)
        twin.round(*seen_batches(done))  # in their order, by which ties of activations are broken
        agree(done, twin)
        assert {name: int(mask.sum()) for name, mask in done.server_masks.items()} == counts
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
    assert moved(record, initial)
    return any(not np.array_equal(first[name], mask) for name, mask in twin.masks.items())


ADJUSTING = {"density": 0.5, "exchange": 0.6, "adjust_every": 1, "adjust_until": 8}
CASES = {
    "FedMef": ({"penalty": 0.3, "psi": 6.0, "max_lr": 0.5}, PLAIN, 4),
    "FedTiny": ({"penalty": 0.0}, HEAVY, 4),
    "clipped": ({"penalty": 1.0, "penalized": 0.8, "psi": 3.0, "max_lr": 9.0}, CLIPPED, 64),
    "activations": ({"penalty": 0.0, "activation_density": 0.4}, PLAIN, 64),
    "seldom": ({"adjust_every": 2, "adjust_until": 3, "activation_density": 0.5}, HEAVY, 4),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_fedmef(fit, case):
    options, sgd, batch_size = CASES[case]
    assert compare_fedmef(fit, FedMef(**{**ADJUSTING, **options}), sgd, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_fedmef_whichever_way_the_engine_goes(fit, option):
    method = FedMef(**ADJUSTING, penalty=0.2, psi=5.0, max_lr=1.0, activation_density=0.5)
    compare_fedmef(fit, method, HEAVY, 4, rounds=3, **option)
