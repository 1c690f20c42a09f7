"""FedRolex against its slow twin, and against HeteroFL where its window stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedRolex, HeteroFL
from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.seeds import generator
from reference import numpy_fedrolex as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, SEED, SIZES, agree, compare, moved, seen_batches
from reference.narrow import OWN_WIDTH, RATES, WIDE
from reference.numpy_fedavg import FedAvg
from reference.test_heterofl_twin import OWN_CLASSES

STEPS = {"forward": 1, "back": -1, "fixed": 0}


@pytest.mark.slow_after_first("sgd", "direction")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("direction", STEPS)
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_fedrolex(fit, execution, direction, sgd, batch_size):
    method = FedRolex(rates=RATES, direction=direction)
    initial, record = fit(method, sgd, batch_size, capacities=WIDE, execution=execution)
    compare(record, slow.FedRolex(initial, OWN_WIDTH, sgd, STEPS[direction]), batch_size)
    assert moved(record, initial)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("scaler", [False, True])
def test_fedrolex_with_masked_labels(fit, monkeypatch, scaler):
    counts = torch.from_numpy(OWN_CLASSES).long()
    monkeypatch.setattr(ClientDataModules, "client_label_counts", lambda self, client: counts[client])
    method = FedRolex(rates=RATES, label_mask=True, scaler=scaler)
    initial, record = fit(method, HEAVY, 4, capacities=WIDE, wire="encode")
    compare(record, slow.FedRolex(initial, OWN_WIDTH, HEAVY, classes=OWN_CLASSES, scaler=scaler), 4)


class Redrawn:
    """Widths of the clients in a round, from capacities that every round draws anew."""

    def __init__(self):
        self.t = 0

    def __getitem__(self, client):
        rng = generator(SEED, self.t, client, "capacity")
        return {0.5: 0.5, 0.7: 0.6, 1.0: 1.0}[WIDE[int(torch.randint(len(WIDE), (), generator=rng))]]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_fedrolex_with_capacities_that_are_drawn_in_every_round(fit, execution):
    rates = Redrawn()
    options = {"capacities": WIDE, "redraw_capacities": True, "execution": execution}
    initial, record = fit(FedRolex(rates=RATES), HEAVY, 4, **options)
    twin = slow.FedRolex(initial, rates, HEAVY)
    for done in record:
        rates.t = twin.t
        twin.round(seen_batches(done)[0])
        agree(done, twin)
    assert len({rates[done.cohort[0]] for rates.t, done in enumerate(record)}) > 1


def test_a_fixed_window_is_heterofl_bit_for_bit(fit):
    runs = [
        fit(method, HEAVY, 4, capacities=WIDE, dtype=torch.float32)[1]
        for method in (FedRolex(rates=RATES, direction="fixed"), HeteroFL(rates=RATES))
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


def test_fedrolex_of_one_width_is_the_plain_mean(fit):
    initial, record = fit(FedRolex(), HEAVY, 64)
    compare(record, FedAvg(initial, [1] * len(SIZES), HEAVY), 64)
