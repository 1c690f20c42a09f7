"""Kept weights and bytes of FLASH."""

from __future__ import annotations

import pytest

CONVOLUTIONS, OTHERS = 11_159_232, 9_600 + 5_130
"""Weights of ResNet-18's convolutions and shortcuts; its norms and its head for ten classes."""


@pytest.mark.slow
def test_what_is_kept_and_sent(profile):
    content = profile("flash", "cifar10")
    assert content["kept"] == pytest.approx(CONVOLUTIONS / 20 + OTHERS, rel=1e-4)  # numbers are rounded down by layer
    assert content["run"]["paper"]["bytes"] == 2 * 4 * content["kept"] * 10 * 600


@pytest.mark.slow
def test_moved_masks_are_sent_with_a_bit_for_each_position(profile):
    content = profile("flash", "cifar10_jmwst")
    assert content["kept"] == pytest.approx(CONVOLUTIONS / 10 + OTHERS, rel=1e-4)
    masks = 10 * CONVOLUTIONS / 8 * (2 * 600 - 1)  # with every message but the first ones
    assert content["run"]["paper"]["bytes"] == pytest.approx(2 * 4 * content["kept"] * 10 * 600 + masks, rel=1e-3)


@pytest.mark.slow
def test_parts_of_the_mask_are_sent_with_a_bit_for_each_position(profile):
    content = profile("flash", "cifar10_hetero")
    whole = CONVOLUTIONS / 20
    assert content["kept"] == pytest.approx(whole + OTHERS, rel=1e-4)
    sent = (0.3 * 0.5 + 0.3 * 0.75 + 0.4) * whole + OTHERS  # of all clients in the mean
    masks = 0.6 * 10 * CONVOLUTIONS / 8 * (600 - 1)  # of those with a part
    assert content["run"]["paper"]["bytes"] == pytest.approx(2 * 4 * sent * 10 * 600 + masks, rel=0.02)
