"""Per-FedAvg against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import PerFedAvg
from reference import numpy_perfedavg as slow
from reference.harness import CLIENTS, CLIPPED, HEAVY, PLAIN, SIZES, agree, close, full_batches, moved, samples
from reference.passes import batches_of, passes


def once(passed, hessian):
    """Each batch once, of which the third of a triple is passed twice."""
    place, kept = 0, []
    while place < len(passed):
        kept.append(passed[place])
        place += 2 if hessian and len(kept) % 3 == 0 else 1
        assert place - 1 < len(passed)
        assert passed[place - 1].tobytes() == kept[-1].tobytes()
    return batches_of(kept)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({"alpha": 0.2, "order": "hessian"}, HEAVY, 4),
        ({"alpha": 0.2}, PLAIN, 64),
        ({"alpha": 0.2, "adapt_steps": 3}, CLIPPED, 4),
    ],
)
def test_perfedavg(fit, options, sgd, batch_size):
    initial, record = fit(PerFedAvg(**options), sgd, batch_size)
    hessian, count = "order" in options, options.get("adapt_steps", 1)
    twin = slow.PerFedAvg(initial, SIZES, sgd, options["alpha"], hessian)
    for done in record:
        trained, evaluated = passes(done)
        assert {k: len(passed) for k, passed in evaluated.items()} == {
            k: count * (1 + (k in done.cohort)) for k in CLIENTS
        }
        seen = {k: once(trained[k], hessian) for k in done.cohort}
        batches = full_batches(done.cohort)[0] if batch_size == 64 else seen
        twin.round(batches, {k: batches_of(passed[-count:]) for k, passed in evaluated.items()})
        agree(done, twin)
    assert moved(record, initial)


@pytest.mark.slow
def test_a_participant_keeps_its_own_trained_weights_after_an_adaptation(fit):
    initial, record = fit(PerFedAvg(alpha=0.2), PLAIN, rounds=1)
    (done,) = record
    twin = slow.PerFedAvg(initial, SIZES, PLAIN, 0.2)
    batches, whole = full_batches(done.cohort)
    for k in done.cohort:
        after = twin.trained(batches[k])
        adapted = slow.stepped(after, slow.gradient(after, *whole[k]), 0.2)
        close({name: value.numpy() for name, value in done.memory[k]["weights"].items()}, adapted)
        assert len(samples(passes(done)[1][k][0])[1]) == SIZES[k]
