"""Kept weights and bytes of SNIP in FedDIP's published tables."""

from __future__ import annotations

import re

import pytest

KEPT = {"fashion_mnist": 6_147, "cifar10": 4_652_582, "cifar100": 2_207_680 + 172_032}
"""A tenth of LeNet-5's weights, a fifth of AlexNet's, and ResNet-18's shortcuts and a fifth of its other layers."""
ALWAYS = {"fashion_mnist": 236, "cifar10": 9_354, "cifar100": 9_700}
"""Biases and norms."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", KEPT)
def test_what_is_kept_and_sent(data: str, profile):
    content = profile("feddip", f"table3/{data}_snip")
    assert content["kept"] == KEPT[data] + ALWAYS[data]
    masked = [layer for name, layer in content["layers"].items() if re.search(r"(conv|fc)\d?\.weight", name)]
    assert all(layer["density"] > 0 for layer in masked)
    assert content["run"]["paper"]["bytes"] == 2 * 4 * content["kept"] * 5 * 1000
