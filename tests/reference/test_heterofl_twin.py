"""HeteroFL against its slow twin, alone and as the base of PerFedMask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import HeteroFL, PerFedMask
from lightning_sparsefl.data import ClientDataModules
from reference import numpy_heterofl as slow
from reference.freezing import HEAD
from reference.harness import CLIPPED, HEAVY, PLAIN, SIZES, compare, moved, tensors
from reference.narrow import NARROW_PLAN, OWN_WIDTH, RATES, WIDE
from reference.numpy_fedavg import FedAvg

OWN_CLASSES = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0]], dtype=bool)
"""Which classes each client is taken to have."""


def compare_heterofl(fit, method, sgd, batch_size, trains=None, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=WIDE, **federation)
    inner = method.base if isinstance(method, PerFedMask) else method
    twin = slow.HeteroFL(
        initial,
        OWN_WIDTH,
        sgd,
        scaler=inner.scaler,
        classes=OWN_CLASSES if inner.label_mask else None,
        trains=trains,
    )
    compare(record, twin, batch_size)
    assert moved(record, initial)
    return initial, record, twin


@pytest.mark.slow_after_first("sgd", "scaler")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "no scaler"])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_heterofl(fit, scaler, execution, sgd, batch_size):
    compare_heterofl(fit, HeteroFL(rates=RATES, scaler=scaler), sgd, batch_size, execution=execution)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("batch_size", [64, 4])
def test_heterofl_with_masked_labels(fit, monkeypatch, batch_size):
    counts = torch.from_numpy(OWN_CLASSES).long()
    monkeypatch.setattr(ClientDataModules, "client_label_counts", lambda self, client: counts[client])
    compare_heterofl(fit, HeteroFL(rates=RATES, label_mask=True), HEAVY, batch_size, wire="encode")


def test_heterofl_of_one_width_is_the_plain_mean(fit):
    initial, record = fit(HeteroFL(), HEAVY, 64)
    compare(record, FedAvg(initial, [1] * len(SIZES), HEAVY), 64)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_perfedmask_over_heterofl(fit, execution):
    method = PerFedMask(base=HeteroFL(rates=RATES), masking="sequential", finetune_epochs=0)
    trains = [tensors(groups) for groups in NARROW_PLAN]
    initial, record, _ = compare_heterofl(fit, method, CLIPPED, 4, trains, execution=execution)
    assert all(np.array_equal(record[-1].weights[name], initial[name]) for name in tensors(HEAD))
