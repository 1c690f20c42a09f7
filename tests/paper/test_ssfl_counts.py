"""Kept weights and bytes of SSFL."""

from __future__ import annotations

import pytest

MATRICES, OTHERS = 11_164_352, 9_610
"""Weights of ResNet-18's convolutions, shortcuts and head for ten classes; its norms and the head's biases."""


@pytest.mark.slow
def test_what_is_kept_and_sent(profile):
    content = profile("ssfl", "cifar10")
    assert content["kept"] == MATRICES // 2 + OTHERS
    assert content["run"]["paper"]["bytes"] == 2 * 4 * content["kept"] * 10 * 500
