"""FedSelect against its slow twin: weights, personal models, and the masks exactly."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from lightning_sparsefl import FedSelect
from reference import numpy_fedselect as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, SIZES, agree, moved, samples

DECAYING = {**PLAIN, "weight_decay": 0.01}
"""Decay moves all weights: where some stay, as below a dead unit, rounding would choose among them."""


def epochs_of(done):
    """The epochs that each client of a round ran, as batches."""
    epochs, left = defaultdict(list), defaultdict(int)
    for training, numbers in done.trained_on:
        assert training
        client = int(numbers[0]) // 100
        if not left[client]:
            epochs[client].append([])
            left[client] = SIZES[client]
        epochs[client][-1].append(samples(numbers))
        left[client] -= len(numbers)
    assert not any(left.values())
    return epochs


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({"every": 1, "alternations": 2}, DECAYING, 64),
        ({"every": 1, "alternations": 2, "rate": 0.6, "bound": 0.5}, HEAVY, 4),
        ({"every": 2, "alternations": 1, "sparse_download": True}, CLIPPED, 4),
        ({"every": 1, "alternations": 1, "rate": 1.0}, HEAVY, 64),
        ({"every": 1, "alternations": 3, "rate": 0.0}, PLAIN, 64),
    ],
)
def test_fedselect(fit, options, sgd, batch_size):
    method = FedSelect(**options)
    initial, record = fit(method, sgd, batch_size, 8)
    rules = {name: getattr(method, name) for name in ("rate", "bound", "every", "alternations")}
    twin = slow.FedSelect(initial, CLIENTS, sgd, **rules)
    for done in record:
        twin.round(epochs_of(done))
        agree(done, twin)
        for k, memory in done.memory.items():
            own = {name: np.asarray(mask) for name, mask in memory["masks"].items()}
            assert all(name in own or not mask.any() for name, mask in twin.own[k].items())
            assert all(np.array_equal(mask, twin.own[k][name]) for name, mask in own.items())
    assert moved(record, initial)
    assert any(mask.any() for own in twin.own.values() for mask in own.values()) == (method.rate > 0)
