"""FedMP against its slow twin, bandit included."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedMP
from lightning_sparsefl.seeds import generator
from reference import numpy_fedmp as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, SEED, SIZES, agree, compare, full_batches, moved, seen_batches
from reference.narrow import WIDE
from reference.numpy_fedavg import FedAvg

SPEED, UPLINK = 1e6, 1e6
"""A device so slow that clients differ by more than a millisecond."""


def uniform(client, round):
    """What chance gives a client in a round."""
    return float(torch.rand((), dtype=torch.float64, generator=generator(SEED, round, client, "FedMP ratio")))


def seconds(client, row):
    capacity = WIDE[client // 2]
    return float(row["flops_train"]) / (capacity * SPEED) + float(row["uplink_bytes"]) / UPLINK


@pytest.mark.slow_after_first("sgd")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_fedmp(fit, execution, sgd, batch_size):
    method = FedMP(loss="train_acc", flops_per_second=SPEED, bytes_per_second=UPLINK, discount=0.7, width=0.3)
    initial, record = fit(method, sgd, batch_size, 9, capacities=WIDE, execution=execution)
    twin = slow.FedMP(initial, sgd, uniform, discount=0.7, width=0.3)
    for done in record:
        batches = full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0]
        times = {k: seconds(k, done.rows[k]) for k in done.cohort}
        twin.round(batches, {k: float(done.rows[k]["local/train_acc"]) for k in done.cohort}, times)
        agree(done, twin)
    assert moved(record, initial)
    assert max(len(bandit.edges) for bandit in twin.bandits.values()) > 3
    assert max(len(bandit.pulls) for bandit in twin.bandits.values()) > 3


@pytest.mark.slow_after_first
@pytest.mark.parametrize("ratio", [0.4, 0.9])
def test_one_ratio_for_all(fit, ratio):
    initial, record = fit(FedMP(ratio=ratio), HEAVY, 4, wire="encode")
    compare(record, slow.FedMP(initial, HEAVY, uniform, ratio=ratio), 4)


def test_nothing_pruned_is_the_plain_mean(fit):
    initial, record = fit(FedMP(ratio=0.0), HEAVY, 64)
    compare(record, FedAvg(initial, [1] * len(SIZES), HEAVY), 64)
