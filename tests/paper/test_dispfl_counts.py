"""Bytes of DisPFL."""

from __future__ import annotations

import pytest

PARAMETERS = 11_173_962
"""Parameters of ResNet-18 for ten classes, all of them in the pool."""


@pytest.mark.slow
def test_what_is_kept_and_sent(profile):
    """A client has ten neighbours and sends its model to ten: in each direction half of ten dense models."""
    content = profile("dispfl", "random")
    assert abs(content["kept"] - PARAMETERS / 2) <= 62  # tensors, whose counts are whole numbers
    assert content["run"]["paper"]["bytes"] == 2 * 10 * 4 * content["kept"] * 100 * 500
