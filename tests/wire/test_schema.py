from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.wire.schema import Schema

BASE = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


@pytest.mark.parametrize(
    "other",
    [
        {"b": BASE["b"], "a": BASE["a"]},
        {"a": BASE["a"]},
        {"a": BASE["a"].T, "b": BASE["b"]},
        {"a": BASE["a"].half(), "b": BASE["b"]},
        {"a": BASE["a"], "c": BASE["b"]},
    ],
)
def test_the_fingerprint_tells_models_apart(other):
    assert Schema(BASE).fingerprint == Schema({name: value + 1 for name, value in BASE.items()}).fingerprint
    assert Schema(BASE).fingerprint != Schema(other).fingerprint


def test_fits_is_by_name_shape_and_type():
    schema = Schema(BASE)
    assert schema.fits("a", torch.ones(2, 3))
    assert not schema.fits("a", torch.ones(3, 2))
    assert not schema.fits("a", torch.ones(2, 3).half())
    assert not schema.fits("c", torch.ones(2, 3))
    assert schema.shape("b") == (4,)
    assert schema.shape("c") is None
    assert schema.nbytes == 40


def test_a_type_that_cannot_be_sent_is_named():
    with pytest.raises(
        InvalidOption, match=r"`z` is torch.complex64, which cannot be encoded; expected one of float32"
    ):
        Schema({"z": torch.zeros(1, dtype=torch.complex64)})
