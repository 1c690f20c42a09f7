"""Kept weights of FedDST in FedDIP's published tables."""

from __future__ import annotations

import pytest

ALWAYS = {"fashion_mnist": 236, "cifar10": 9_354, "cifar100": 9_700 + 172_032}
"""Biases and norms, and ResNet-18's shortcuts."""
KEPT = {"fashion_mnist": 6_144, "cifar10": 2_326_288, "cifar100": 2_207_674}
"""ERK rounds each layer down: LeNet-5 keeps 3 weights fewer than a tenth of 61,470."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", KEPT)
def test_what_is_kept(data: str, profile):
    content = profile("feddip", f"table3/{data}_feddst")
    assert content["kept"] - ALWAYS[data] == KEPT[data]
    share = 0.2 if data == "cifar100" else 0.1
    lost = share * (content["parameters"] - ALWAYS[data]) - KEPT[data]
    assert 0 <= lost < len(content["layers"])
    assert content["run"]["paper"]["downlink_bytes"] == 4 * content["kept"] * 5 * 1000  # the middles have no search
