"""FedBN against its slow twin, whichever way the federation treats buffers."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import FedBN
from reference import numpy_fedbn as slow
from reference.harness import CLIENTS, HEAVY, PLAIN, SIZES, compare, full_batches, moved

COUNTER = "net.1.num_batches_tracked"


def close(ours, twin):
    for name, value in twin.items():
        assert np.abs(ours[name] - value).max() < 1e-9, name


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("mean", "buffers", "sgd"),
    [("uniform", "average", PLAIN), ("samples", "average", HEAVY), ("uniform", "local", HEAVY)],
)
def test_fedbn(fit, mean, buffers, sgd):
    initial, record = fit(FedBN(mean=mean), sgd, norm=True, buffers=buffers)
    del initial[COUNTER]
    twin = slow.FedBN(initial, SIZES if mean == "samples" else dict.fromkeys(CLIENTS, 1), sgd)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        close(done.weights, twin.weights)
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k))
    assert moved(record, initial)
    assert all(np.array_equal(record[-1].weights[name], initial[name]) for name in twin.own)  # of no client
    assert len({twin.personal(k)["net.1.running_mean"].tobytes() for k in twin.kept}) == len(twin.kept) > 3


def test_a_model_without_norms_is_averaged_as_a_whole(fit):
    initial, record = fit(FedBN(mean="samples"), PLAIN)
    twin = slow.FedPer(initial, [], SIZES, PLAIN)
    compare(record, twin, 64)
    assert moved(record, initial)
