"""FedBABU against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import FedBABU, PerFedMask
from reference import numpy_fedbabu as slow
from reference.freezing import BODY, HEAD, compare_freezing
from reference.harness import CLIPPED, EPOCHS, HEAVY, PLAIN, SIZES, tensors


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
def test_fedbabu(fit, sgd, batch_size):
    method = FedBABU(finetune_epochs=EPOCHS)

    def twin_of(initial):
        return slow.FedBABU(initial, tensors(BODY), SIZES, sgd)

    initial, record = compare_freezing(fit, method, twin_of, sgd, batch_size)
    assert all(np.array_equal(record[-1].weights[name], initial[name]) for name in tensors(HEAD))
    _, other = fit(PerFedMask(finetune_epochs=EPOCHS), sgd, batch_size)  # with capacities of 1 all is the same
    for one, same in zip(record, other, strict=True):
        assert all(np.array_equal(one.weights[name], same.weights[name]) for name in initial)
