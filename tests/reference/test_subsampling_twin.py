"""Subsampling against its slow twin, which gets the coordinates that were drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import Subsampling
from lightning_sparsefl.types import ClientView, Message, ServerState
from reference import numpy_subsampling as slow
from reference.harness import HEAVY, PER_ROUND, PLAIN, ROUNDS, SEED, SIZES, agree, full_batches, moved


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "scale"), [(HEAVY, True), (PLAIN, False)])
def test_subsampling(fit, sgd, scale):
    method = Subsampling(fraction=0.3, scale=scale)
    initial, record = fit(method, sgd)
    twin = slow.Subsampling(initial, SIZES, sgd, scale)
    server = ServerState(round=0, weights={n: torch.from_numpy(w) for n, w in initial.items()}, extra={"buffers": {}})
    for number, done in enumerate(record):
        drawn = {}
        for k in done.cohort:
            view = ClientView(k, SIZES[k], 1.0, number, ROUNDS, SEED)
            message: Message = method.download(server, view)
            drawn[k] = {name: mask.numpy() for name, mask in method.may_vote(message).items()}
        sent = sum(mask.sum() for masks in drawn.values() for mask in masks.values())
        assert abs(sent / PER_ROUND / sum(w.size for w in initial.values()) - 0.3) < 0.02
        twin.sampled_round(full_batches(done.cohort)[0], drawn)
        agree(done, twin)
    assert moved(record, initial)
    assert any(np.any(masks["net.0.weight"]) for masks in drawn.values())
