"""FedAvg against its slow twin, and what all methods share: cohorts, batches, learning rates by round, precision."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, FedSpa
from lightning_sparsefl.federated.local.round_lr import ExponentialRoundLR
from lightning_sparsefl.seeds import derive_key, seed_all
from reference import numpy_fedavg as slow
from reference.harness import (
    CLIPPED,
    EPOCHS,
    HEAVY,
    PLAIN,
    ROUNDS,
    SEED,
    SIZES,
    ClientData,
    agree,
    check_cohorts,
    compare,
    full_batches,
    moved,
)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 64), (CLIPPED, 64), (HEAVY, 4)])
def test_fedavg(fit, sgd, batch_size):
    initial, record = fit(FedAvg(), sgd, batch_size)
    check_cohorts(record)
    compare(record, slow.FedAvg(initial, SIZES, sgd), batch_size)
    assert moved(record, initial)


def test_rates_that_fall_with_the_round(fit):
    initial, record = fit(FedAvg(), HEAVY, round_lr=ExponentialRoundLR(gamma=0.8))
    twin = slow.FedAvg(initial, SIZES, dict(HEAVY))
    for t, done in enumerate(record):
        twin.sgd["lr"] = HEAVY["lr"] * 0.8**t
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)


def test_precision_64_true_turns_a_float32_module_into_float64(fit):
    initial, record = fit(FedAvg(), PLAIN, rounds=2, dtype=torch.float32)
    compare(record, slow.FedAvg(initial, SIZES, PLAIN), 64)


def test_cohorts_and_orders_follow_from_seed_round_and_client(fit):
    _, sparse = fit(FedSpa(), PLAIN, 4)
    _, dense = fit(FedAvg(), HEAVY, 4)
    assert [done.cohort for done in sparse] == [done.cohort for done in dense]
    for t, (one, other) in enumerate(zip(sparse, dense, strict=True)):
        for k in one.cohort:
            expected = [numbers.tolist() for numbers in order(k, t, "fit", EPOCHS)]
            assert expected == drawn(one, k, training=True) == drawn(other, k, training=True)
            if t < ROUNDS - 1:
                assert [order(k, t, "gradient", 1)[0].tolist()] == drawn(one, k, training=False)


def order(client, t, purpose, epochs):
    loader = ClientData(client, 4).train_dataloader()
    seed_all(derive_key(SEED, "client", client), t, "train", purpose, 0)
    return [numbers for _ in range(epochs) for _, _, numbers in loader]


def drawn(done, client, *, training):
    return [n.tolist() for mode, n in done.trained_on if mode == training and n[0] // 100 == client]
