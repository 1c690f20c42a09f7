"""APFL against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import APFL, FedAvg, Local
from reference import numpy_apfl as slow
from reference.harness import CLIPPED, HEAVY, PER_ROUND, PLAIN, SIZES, agree, arrays, close, full_batches, moved
from reference.passes import every, passes


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({"alpha": 0.5, "adaptive": True}, HEAVY, 4),
        ({"alpha": 0.75}, PLAIN, 64),
        ({"alpha": 0.3, "adaptive": True}, CLIPPED, 64),
        ({"alpha": 0.0}, PLAIN, 64),
        ({"alpha": 1.0}, PLAIN, 4),
    ],
)
def test_apfl(fit, options, sgd, batch_size):
    initial, record = fit(APFL(**options), sgd, batch_size)
    twin = slow.APFL(initial, SIZES, sgd, **options)
    for done in record:
        trained, _ = passes(done)
        seen = {k: every(2, trained[k]) for k in done.cohort}
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen)
        agree(done, twin)
        for k, (_, share, _) in twin.own.items():
            assert done.memory[k]["alpha"] == pytest.approx(share, abs=1e-9)
    assert len(twin.own) > PER_ROUND
    assert moved(record, initial)
    shares = {round(share, 6) for _, share, _ in twin.own.values()}
    assert (len(shares) > 2) == options.get("adaptive", False)


@pytest.mark.slow
def test_personal_weights_alone_are_those_of_local(fit):
    (_, alone), (_, mixed) = fit(Local(), PLAIN, 4), fit(APFL(alpha=1.0), PLAIN, 4)
    for one, other in zip(alone, mixed, strict=True):
        assert one.memory.keys() == other.memory.keys()
        for k, memory in one.memory.items():
            close(arrays(other.memory[k]["personal"]), arrays(memory["weights"]))
            close(arrays(other.memory[k]["mixture"]), arrays(memory["weights"]))


@pytest.mark.slow
def test_without_personal_weights_each_client_has_its_own_copy_of_fedavg(fit):
    (_, plain), (_, mixed) = fit(FedAvg(), HEAVY, 4), fit(APFL(alpha=0.0), HEAVY, 4)
    for one, other in zip(plain, mixed, strict=True):
        assert all((one.weights[name] == other.weights[name]).all() for name in one.weights)
