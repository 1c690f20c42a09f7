"""Split-Mix against its slow twin, alone and as the base of PerFedMask."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_sparsefl import PerFedMask, SplitMix
from reference import numpy_splitmix as slow
from reference.harness import (
    CLIENTS,
    CLIPPED,
    EPOCHS,
    HEAVY,
    PLAIN,
    SIZES,
    TOLERANCE,
    ClientData,
    agree,
    compare,
    moved,
    samples,
    tensors,
)
from reference.narrow import NARROW_PLAN, WIDE
from reference.numpy_fedavg import FedAvg
from reference.numpy_network import forward


def batches_by_base(done, twin):
    """What each base network of a client was trained on: they take turns, all epochs at once."""
    found = {}
    for k in done.cohort:
        numbers = [n for _, n in done.trained_on if n[0] // 100 == k]
        bases = twin.own(k, twin.t)
        share = len(numbers) // len(bases)
        assert share * len(bases) == len(numbers)
        found[k] = {b: [samples(n) for n in numbers[i * share : (i + 1) * share]] for i, b in enumerate(bases)}
        assert all(sum(len(y) for _, y in steps) == EPOCHS * SIZES[k] for steps in found[k].values())
    return found


def compare_splitmix(fit, method, sgd, batch_size, trains=None, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=WIDE, **federation)
    bases = (method.base if isinstance(method, PerFedMask) else method).bases
    counts = [max(1, math.floor(capacity * bases)) for capacity in np.repeat(WIDE, 2)]
    twin = slow.SplitMix(initial, bases, counts, SIZES, sgd, trains)
    x = ClientData(0, 1).x
    for done in record:
        twin.round(batches_by_base(done, twin))
        agree(done, twin)
        for k in CLIENTS:  # one module holds the ensemble
            mixed = forward(done.scored_with[k], x)[1]
            assert np.abs(mixed - twin.logits(twin.own(k, 0), x)).max() < TOLERANCE
    assert moved(record, initial)
    return initial, record, twin


@pytest.mark.slow_after_first("sgd", "bases")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("bases", [2, 3])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_splitmix(fit, bases, execution, sgd, batch_size):
    compare_splitmix(fit, SplitMix(bases=bases), sgd, batch_size, execution=execution)


def test_splitmix_of_one_network_is_fedavg(fit):
    initial, record = fit(SplitMix(bases=1), HEAVY, 64)
    compare(record, FedAvg(initial, SIZES, HEAVY), 64)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_perfedmask_over_splitmix(fit, execution):
    method = PerFedMask(base=SplitMix(bases=2), masking="sequential", finetune_epochs=0)
    trains = [tensors(groups) for groups in NARROW_PLAN]
    compare_splitmix(fit, method, CLIPPED, 4, trains, execution=execution, wire="encode")
