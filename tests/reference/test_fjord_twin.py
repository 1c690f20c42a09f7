"""FjORD against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedAvg, FjORD
from lightning_sparsefl.callbacks import OrderedDropout
from lightning_sparsefl.seeds import derive_key, derive_seed
from reference import numpy_fjord as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, SEED, SIZES, compare, moved
from reference.narrow import OWN_WIDTH, RATES, WIDE


def drawn(client, round, step):
    """The rate that chance gives a client's step: from the key of its order."""
    seed = derive_seed(derive_key(SEED, "client", client), round, "train", "rates", 0)
    rates = sorted(rate for rate in RATES if rate <= OWN_WIDTH[client])
    return OrderedDropout(rates, seed=seed).draw(step)


@pytest.mark.slow_after_first("sgd", "distill")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 4), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("distill", [False, True], ids=["alone", "distilled"])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_fjord(fit, execution, distill, sgd, batch_size):
    initial, record = fit(FjORD(rates=RATES, distill=distill), sgd, batch_size, capacities=WIDE, execution=execution)
    if distill:  # each batch is passed twice, and what the second pass notes is undone
        assert all(len(done.passed_on) == 2 * len(done.trained_on) for done in record)
    compare(record, slow.FjORD(initial, SIZES, OWN_WIDTH, drawn, sgd, distill), batch_size)
    assert moved(record, initial)
    rates = {drawn(k, t, step) for k in range(6) for t in range(5) for step in range(4)}
    assert rates == set(RATES)


def test_fjord_of_one_width_is_federated_averaging_bit_for_bit(fit):
    runs = [fit(method, HEAVY, 4, dtype=torch.float32)[1] for method in (FjORD(rates=(1.0,)), FedAvg())]
    for ours, theirs in zip(*runs, strict=True):
        assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
