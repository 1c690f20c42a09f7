"""FedP3 against its slow twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedP3
from lightning_sparsefl.seeds import derive_key, generator
from reference import numpy_fedp3 as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, SEED, agree, moved, seen_batches, tensors

SHAPES = {"net.0.weight": (8, 6), "net.2.weight": (7, 8)}


def local_masks(method, k, t):
    """The package's draws: first the width, then a number for each weight."""
    if method.local_pruning == "fixed":
        return {}
    rng = generator(derive_key(SEED, "client", k), t, "train", "local pruning", 0)
    width = method.local_width + (1 - method.local_width) * float(torch.rand((), generator=rng))
    if method.local_pruning == "uniform":
        return {name: (torch.rand(shape, generator=rng) < width).numpy() for name, shape in SHAPES.items()}
    kept = {name: [math.ceil(width * length) for length in shape] for name, shape in SHAPES.items()}
    indices = {name: np.indices(shape) for name, shape in SHAPES.items()}
    return {name: (indices[name][0] < rows) & (indices[name][1] < columns) for name, (rows, columns) in kept.items()}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({"owned": 1}, PLAIN, 64),
        ({"owned": 1, "keep": 0.3, "head": "shared"}, HEAVY, 4),
        ({"owned": 2, "keep": 0.5}, CLIPPED, 4),
        ({"owned": 1, "local_pruning": "uniform", "local_width": 0.3}, HEAVY, 4),
        ({"owned": 1, "local_pruning": "ordered", "local_width": 0.5, "head": "shared"}, CLIPPED, 64),
    ],
)
def test_fedp3(fit, options, sgd, batch_size):
    method = FedP3(**options)
    initial, record = fit(method, sgd, batch_size)
    hidden, head = [tensors(["net.0"]), tensors(["net.2"])], tensors(["net.4"])
    rules = {"owned": method.owned, "keep": method.keep, "own_head": method.head == "own"}
    twin = slow.FedP3(initial, hidden, head, len(CLIENTS), sgd, **rules)
    assert [twin.owns(k) == set(hidden[k // 3]) for k in CLIENTS] == [method.owned == 1] * 6
    for t, done in enumerate(record):
        twin.round(seen_batches(done)[0], {k: local_masks(method, k, t) for k in done.cohort})
        agree(done, twin)
    assert moved(record, initial)
    zeros = [float((twin.received(k)[f"net.{2 - k // 3 * 2}.weight"] == 0).mean()) for k in CLIENTS]
    assert np.allclose(zeros, 0 if method.owned == 2 else 1 - method.keep, atol=0.02)
