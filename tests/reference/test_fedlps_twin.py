"""FedLPS against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedLPS
from lightning_sparsefl.seeds import derive_key, derive_seed, generator
from reference import numpy_fedlps as slow_lps
from reference import numpy_pucbv as slow_bandit
from reference.harness import (
    CLIENTS,
    CLIPPED,
    EPOCHS,
    HEAVY,
    PER_ROUND,
    PLAIN,
    ROUNDS,
    SEED,
    SIZES,
    TOLERANCE,
    ClientData,
    close,
    moved,
    seen_batches,
)
from reference.numpy_network import forward

HIDDEN = {"net.0": 8, "net.2": 7}
LEVELS = [1.0, 0.5, 0.25]
"""Capacities, each of a block of two clients."""


def drawn_units(k, t):
    """What ranks the units of a client in a round where they are drawn."""
    seed = derive_seed(derive_key(SEED, "client", k), "pattern")
    return [torch.rand(size, generator=generator(seed, t, "units", name)).numpy() for name, size in HIDDEN.items()]


class Bandits:
    """The densities of every client, from the bandit's twin and what the run's table says of rewards."""

    def __init__(self, method):
        self.method = method
        own = (method.arms_from, method.explore, method.compare_with)
        make = slow_bandit.Bandit
        self.of = {k: make(method.arms, method.rho, ROUNDS / PER_ROUND, method.drop, *own) for k in CLIENTS}

    def choose(self, k, t):
        """The client resets what exceeds its capacity."""
        rng = generator(SEED, t, k, "density")
        drawn = self.of[k].choose(
            lambda count: int(torch.randint(count, (1,), generator=rng)),
            lambda: 1 - float(torch.rand((), dtype=torch.float64, generator=rng)),
        )
        return min(drawn, self.capacity(k))

    def capacity(self, k):
        return LEVELS[k // 2]

    def learn(self, k, density, row):
        before = self.of[k].accuracy
        first = row["local/train_acc_first"] if before is None else before
        seconds = float(row["flops_train"]) / (self.capacity(k) * self.method.flops_per_second)
        seconds += self.method.alpha * float(row["uplink_bytes"]) / self.method.bytes_per_second
        self.of[k].learn(density, float(row["local/train_acc"]), float(first), seconds / self.method.time_unit)
        return seconds


def density_of(method, bandits, k, t):
    if method.ratio == "fixed":
        return method.density
    return bandits.capacity(k) if method.ratio == "capacity" else bandits.choose(k, t)


def check_price(method, row, initial, kept, k, before):
    """Three forward passes of the part for every sample, and of the whole for the probe's batch; the first accuracy."""
    whole = slow_lps.forward_flops(initial, [np.ones(size, dtype=bool) for size in HIDDEN.values()])
    flops = 3 * EPOCHS * SIZES[k] * slow_lps.forward_flops(initial, kept)
    flops += 3 * SIZES[k] * whole * (method.probe and method.pattern == "learned")
    flops += SIZES[k] * whole * (method.ratio == "bandit" and before is None)
    assert float(row["flops_train"]) == pytest.approx(flops, rel=1e-12)


def check_memory(memory, twin, k, personal):
    """The client's scores, and the units of its last model if that is its personal model."""
    if personal:
        for kept, expected in zip(memory["kept"].values(), twin.kept[k], strict=True):
            assert np.array_equal(kept.numpy(), expected)
    for score, expected in zip(memory["scores"].values(), twin.scores[k] or [], strict=True):
        assert np.abs(score.numpy() - expected).max() < TOLERANCE


def compare_fedlps(fit, method, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=LEVELS, **federation)
    bandits = Bandits(method)
    scored_at = {k: method.density if method.ratio == "fixed" else bandits.capacity(k) for k in CLIENTS}
    twin = slow_lps.FedLPS(initial, SIZES, sgd, method, scored_at)
    for t, done in enumerate(record):
        batches, probes = seen_batches(done)
        assert set(probes) == (set(done.cohort) if method.probe and method.pattern == "learned" else set())
        densities = {k: density_of(method, bandits, k, t) for k in done.cohort}
        twin.round(t, batches, probes, densities, {k: drawn_units(k, t) for k in done.cohort})
        slowest = 0.0
        for k in done.cohort:
            check_memory(done.memory[k], twin, k, densities[k] > method.score_above)
            if batch_size == 64:  # a batch of all
                check_price(method, done.rows[k], initial, twin.kept[k], k, bandits.of[k].accuracy)
            if method.ratio == "bandit":
                if bandits.of[k].accuracy is None:
                    own = ClientData(k, 1)
                    right = forward(initial, own.x[: SIZES[k]])[1].argmax(1) == own.y[: SIZES[k]]
                    assert float(done.rows[k]["local/train_acc_first"]) == pytest.approx(right.mean())
                slowest = max(slowest, bandits.learn(k, densities[k], done.rows[k]))
        if method.ratio == "bandit":
            assert done.losses["time/simulated"] == pytest.approx(slowest)
        close(done.weights, twin.weights)
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k, t + 1, drawn_units(k, t + 1)))
    assert moved(record, initial)
    return twin


FEDLPS = {
    "defaults": {},
    "as printed": {"reduction": "sum"},
    "published code": {
        "mu": 0.0,
        "arms_from": 0.5,
        "explore": "epsilon",
        "compare_with": "best",
        "score_above": 0.4,
        "time_unit": 0.001,
    },
    "literal bandit": {"explore": "bonus", "arms": 3, "alpha": 0.0},
    "flst": {"ratio": "fixed", "score_lr": 1.0},
    "rcr": {"ratio": "capacity", "reduction": "sum", "mu": 0.01, "score_lr": 0.5},
    "once a round": {"refresh": "round", "reduction": "sum", "mu": 0.01, "score_lr": 1.0},
    "no probe": {"ratio": "fixed", "density": 0.3, "probe": False, "mu": 0.0, "score_strength": 0.2},
    "magnitude": {"ratio": "fixed", "pattern": "magnitude", "mu": 0.1},
    "magnitude once a round": {"ratio": "capacity", "pattern": "magnitude", "refresh": "round", "mu": 0.1},
    "ordered": {"ratio": "capacity", "pattern": "ordered"},
    "random": {"ratio": "fixed", "pattern": "random", "mu": 0.1},
    "rolling": {"ratio": "bandit", "pattern": "rolling", "mu": 0.1, "alpha": 0.0},
}


@pytest.mark.slow_after_first("sgd")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (CLIPPED, 64)], ids=["plain", "clipped"])
@pytest.mark.parametrize("options", FEDLPS.values(), ids=FEDLPS)
def test_fedlps(fit, options, sgd, batch_size):
    twin = compare_fedlps(fit, FedLPS(**options), sgd, batch_size)
    assert len(twin.own) > PER_ROUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"ratio": "fixed", "mu": 0.1}, {"ratio": "capacity", "refresh": "round"}], ids=repr
)
def test_fedlps_on_small_batches(fit, options):
    compare_fedlps(fit, FedLPS(**options), HEAVY, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [{"local_engine": "trainer"}, {"wire": "encode"}, {"execution": "cut"}], ids=["trainer", "encode", "cut"]
)
@pytest.mark.parametrize("pattern", ["learned", "rolling"])
def test_fedlps_whichever_way_the_engine_goes(fit, option, pattern):
    method = FedLPS(ratio="capacity", refresh="round", pattern=pattern, mu=0.1)
    compare_fedlps(fit, method, CLIPPED, 4, **option)
