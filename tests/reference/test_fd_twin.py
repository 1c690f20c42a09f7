"""Federated Dropout against its slow twin."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FD
from lightning_sparsefl.seeds import derive_seed
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.width import ranked_units
from reference import numpy_fd as slow
from reference.harness import CLIPPED, FEATURES, HEAVY, PLAIN, SEED, SIZES, Net, compare, moved
from reference.narrow import OWN_WIDTH, WIDE
from reference.numpy_fedavg import FedAvg

OWN_CAPACITY = [WIDE[k // 2] for k in range(len(OWN_WIDTH))]


def draws(method, capacity):
    """The units that chance gives a client in a round."""
    groups = find_groups(Net(**PLAIN), torch.zeros(1, FEATURES))

    def kept(client, round):
        seed = derive_seed(SEED, "FD", *([client] if method.per == "client" else []))
        rate, rounding = (method.keep, "nearest") if method.rate == "keep" else (capacity[client], "up")
        chosen = ranked_units(groups, rate, "random", turn=round, seed=seed, rounding=rounding)
        return [units.nonzero().flatten().tolist() for units in chosen.values()]

    return kept


@pytest.mark.slow_after_first("sgd")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_fd(fit, execution, sgd, batch_size):
    method = FD(keep=0.6)
    initial, record = fit(method, sgd, batch_size, execution=execution)
    compare(record, slow.FD(initial, SIZES, draws(method, None), sgd), batch_size)
    assert moved(record, initial)


def test_efd(fit):
    method = FD(rate="capacity", per="round")
    initial, record = fit(method, HEAVY, 4, capacities=WIDE, wire="encode")
    compare(record, slow.FD(initial, SIZES, draws(method, OWN_CAPACITY), HEAVY), 4)
    assert moved(record, initial)


def test_the_whole_model_is_federated_averaging(fit):
    initial, record = fit(FD(keep=1.0), HEAVY, 64)
    compare(record, FedAvg(initial, SIZES, HEAVY), 64)
