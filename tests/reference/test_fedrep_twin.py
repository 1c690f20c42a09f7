"""FedRep against its slow twin: rounds of two fits, and the last fit of the head."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import FedRep
from reference import numpy_fedrep as slow
from reference.harness import (
    CLIENTS,
    CLIPPED,
    EPOCHS,
    HEAVY,
    PLAIN,
    SIZES,
    close,
    compare,
    moved,
    seen_batches,
    tensors,
)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("head_epochs", "sgd", "batch_size"), [(1, PLAIN, 64), (1, HEAVY, 4), (1, CLIPPED, 4), (0, HEAVY, 4)]
)
def test_fedrep(fit, head_epochs, sgd, batch_size):
    method = FedRep(head_epochs=head_epochs, body_epochs=EPOCHS - head_epochs, finetune_epochs=EPOCHS)
    initial, record = fit(method, sgd, batch_size)
    twin = slow.FedRep(initial, tensors(["net.4"]), SIZES, sgd, head_epochs / EPOCHS)
    compare(record, twin, batch_size)
    assert moved(record, initial)
    head_moved = any(np.abs(kept["net.4.weight"] - initial["net.4.weight"]).max() > 0 for kept in twin.kept.values())
    assert head_moved == (head_epochs > 0)
    after = fit.left.scored_with
    batches, _ = seen_batches(record[-1]._replace(trained_on=fit.left.trained_on))
    for k in CLIENTS:
        close(after[k], twin.finetuned(k, batches[k]))
