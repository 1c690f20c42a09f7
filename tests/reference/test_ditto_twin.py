"""Ditto against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import Ditto, Local
from reference import numpy_ditto as slow
from reference.harness import CLIPPED, HEAVY, PER_ROUND, PLAIN, SIZES, agree, arrays, close, full_batches, moved
from reference.passes import batches_of, passes


def halves(done):
    """The batches of a client's first fit and of its second one."""
    trained, _ = passes(done)
    assert all(len(passed) % 2 == 0 for passed in trained.values())
    return (
        {k: batches_of(trained[k][: len(trained[k]) // 2]) for k in done.cohort},
        {k: batches_of(trained[k][len(trained[k]) // 2 :]) for k in done.cohort},
    )


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
def test_ditto(fit, sgd, batch_size):
    initial, record = fit(Ditto(lam=0.5), sgd, batch_size)
    twin = slow.Ditto(initial, SIZES, sgd, lam=0.5)
    for done in record:
        whole, _ = full_batches(done.cohort)
        twin.round(*((whole, whole) if batch_size == 64 else halves(done)))
        agree(done, twin)
    assert len(twin.own) > PER_ROUND
    assert moved(record, initial)


@pytest.mark.slow
def test_ditto_with_epochs_of_its_own(fit):
    initial, record = fit(Ditto(lam=0.5, global_epochs=1, personal_epochs=3), HEAVY)
    twin = slow.Ditto(initial, SIZES, HEAVY, lam=0.5)
    for done in record:
        _, whole = full_batches(done.cohort)
        twin.round({k: [whole[k]] for k in whole}, {k: [whole[k]] * 3 for k in whole})
        agree(done, twin)


@pytest.mark.slow
def test_without_a_pull_the_personal_models_are_those_of_local(fit):
    """In batches of all samples, since a second fit draws another order."""
    (_, alone), (_, beside) = fit(Local(), HEAVY), fit(Ditto(lam=0.0), HEAVY)
    for one, other in zip(alone, beside, strict=True):
        assert one.memory.keys() == other.memory.keys()
        for k, memory in one.memory.items():
            close(arrays(other.memory[k]["weights"]), arrays(memory["weights"]))
