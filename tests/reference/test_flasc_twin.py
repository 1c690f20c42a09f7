"""FLASC against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sparsefl import FLASC
from reference import numpy_flasc as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, compare, moved, tensors

FIRST, MIDDLE, LAST = (tensors([f"net.{place}"]) for place in (0, 2, 4))
SERVER_LR = 0.02
"""AdamW divides changes by their size, so that it also magnifies the rounding of small ones in the merge."""
PARTS = {
    "adapter and head": ({"adapters": ("net.2",), "whole": ("head",)}, MIDDLE, LAST),
    "the head chosen from": ({"adapters": ("net.2.*", "head"), "whole": ()}, [*MIDDLE, *LAST], []),
    "a frozen matrix": (
        {"adapters": ("net.0", "net.2"), "whole": ("net.4",), "frozen": ("net.0.weight",)},
        ["net.0.bias", *MIDDLE],
        LAST,
    ),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(CLIPPED, 4), (PLAIN, 64), (HEAVY, 4)])
@pytest.mark.parametrize("parts", PARTS)
def test_flasc(fit, parts, sgd, batch_size):
    options, adapters, whole = PARTS[parts]
    method = FLASC(**options, down_density=0.5, up_density=0.3, server_lr=SERVER_LR)
    initial, record = fit(method, sgd, batch_size)
    compare(record, slow.FLASC(initial, sgd, adapters, whole, down=0.5, up=0.3, lr=SERVER_LR), batch_size)
    assert moved(record, initial)
    for name, value in initial.items():
        assert np.array_equal(record[-1].weights[name], value) == (name not in [*adapters, *whole])


@pytest.mark.slow
def test_flasc_over_the_wire_and_in_a_real_trainer(fit):
    options, adapters, whole = PARTS["adapter and head"]
    initial, record = fit(FLASC(**options), CLIPPED, 4, 3, wire="encode", local_engine="trainer")
    compare(record, slow.FLASC(initial, CLIPPED, adapters, whole, down=0.25, up=0.25, lr=1e-3), 4)
