"""pFedMe against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import PFedMe
from reference import numpy_pfedme as slow
from reference.harness import CLIPPED, HEAVY, PER_ROUND, PLAIN, SIZES, agree, full_batches, moved
from reference.passes import every, passes


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "sgd", "batch_size"),
    [
        ({"lam": 2.0, "personal_lr": 0.2, "steps": 3}, PLAIN, 4),
        ({"lam": 3.0, "personal_lr": 0.2, "steps": 1, "decay": 0.01}, HEAVY, 4),
        ({"lam": 2.0, "personal_lr": 0.2, "steps": 5, "beta": 2.0}, CLIPPED, 64),
    ],
)
def test_pfedme(fit, options, sgd, batch_size):
    initial, record = fit(PFedMe(**options), sgd, batch_size)
    twin = slow.PFedMe(initial, SIZES, sgd, **options)
    for done in record:
        trained, _ = passes(done)
        seen = {k: every(options["steps"], trained[k]) for k in done.cohort}
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen)
        agree(done, twin)
    assert len(twin.own) > PER_ROUND
    assert moved(record, initial)
