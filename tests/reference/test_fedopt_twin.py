"""FedOpt, and the same optimizers as an option of the federation, against their slow twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedAvg, FedOpt
from lightning_sparsefl.federated import ServerOptimizer
from lightning_sparsefl.federated.aggregation.server_optimizer import optimized, with_moments
from lightning_sparsefl.types import Merged, ServerState
from reference import numpy_fedopt as slow
from reference.harness import HEAVY, SIZES, close, compare, full_batches, moved

CASES = {
    "adam": ({"lr": 0.05}, {"s": 0.05, "b1": 0.9}),
    "momentum": ({"beta1": 0.7}, {"s": 1.0, "b1": 0.7}),
    "adagrad": ({"tau": 0.01}, {"s": 0.1, "b1": 0.0, "tau": 0.01}),
    "yogi": ({"start": "mean", "beta2": 0.9}, {"s": 0.1, "b1": 0.9, "b2": 0.9, "raw_first": True}),
    "adamw": ({"lr": 0.02}, {"s": 0.02, "b1": 0.9, "b2": 0.999, "tau": 1e-8, "decay": 0.01}),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("rule", CASES)
def test_fedopt(fit, rule):
    options, twins = CASES[rule]
    initial, record = fit(FedOpt(rule=rule, **options), HEAVY)
    compare(record, slow.FedOpt(initial, SIZES, HEAVY, rule, **twins), 64)
    assert moved(record, initial)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("rule", CASES)
def test_the_option_of_the_federation(fit, rule):
    options, twins = CASES[rule]
    initial, record = fit(FedAvg(), HEAVY, rounds=3, server_optimizer=ServerOptimizer(rule=rule, **options))
    twin = slow.FedOpt(initial, SIZES, HEAVY, rule, **twins)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        close(done.weights, twin.weights)


@pytest.mark.parametrize("kind", ["weights", "difference"])
def test_adamw_of_coordinates_without_votes_and_dropped_ones(kind):
    rng, size = np.random.default_rng(0), 12
    twin = slow.AdamW(rng.normal(size=size), **CASES["adamw"][1])
    optimizer = ServerOptimizer(rule="adamw", lr=0.02)
    server = ServerState(round=0, weights={"w": torch.tensor(twin.w)})
    for round in range(30):
        change, covered, kept = rng.normal(size=size), rng.random(size) < 0.7, rng.random(size) < 0.9
        votes = covered if round > 2 else np.ones(size, dtype=bool)
        change = np.where(votes, change, 0)
        old = server.weights["w"].numpy()
        mean = torch.from_numpy(np.where(votes, old + change, 0) if kind == "weights" else change)
        merged, moments = optimized(optimizer, server, Merged({"w": mean}, {"w": torch.from_numpy(votes)}, kind), set())
        stepped = merged.weights["w"] + (0 if kind == "weights" else server.weights["w"])
        server = replace(server, round=round + 1, weights={"w": stepped}, masks={"w": torch.from_numpy(kept)})
        server = with_moments(optimizer, server, moments)
        twin.step(change, votes)
        twin.forget(kept)
        np.testing.assert_allclose(stepped.numpy(), twin.w, rtol=1e-12, atol=1e-12)
