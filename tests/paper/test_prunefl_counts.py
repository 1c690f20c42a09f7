"""Kept weights and bytes of PruneFL in FedDIP's published tables."""

from __future__ import annotations

import pytest

ALWAYS = {"fashion_mnist": 236, "cifar10": 9_354, "cifar100": 9_700 + 172_032}
"""Biases and norms, and ResNet-18's shortcuts."""
KEPT = {"fashion_mnist": 6_147, "cifar10": 2_326_291, "cifar100": 2_207_680}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", KEPT)
def test_what_is_kept_in_the_end(data: str, profile):
    content = profile("feddip", f"table3/{data}_prunefl")
    assert round(content["final_density"] * (content["parameters"] - ALWAYS[data])) == KEPT[data]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", KEPT)
def test_the_bytes_of_a_round_follow_the_cubic(data: str, profile):
    content = profile("feddip", f"table3/{data}_prunefl")
    first, last = (0.95, 0.2) if data == "cifar100" else (0.5, 0.1)
    pool = content["parameters"] - ALWAYS[data]
    middles = [50 * part + 24 for part in range(20)]  # of the twentieths of a run, in none of which a mask is new
    shares = [last + (first - last) * (1 - (t - t % 20 - 1) / 1000) ** 3 for t in middles]
    mean = sum(int(share * pool) for share in shares) / 20 + ALWAYS[data]
    assert content["run"]["paper"]["downlink_bytes"] == pytest.approx(4 * mean * 5 * 1000, rel=1e-6)
    assert content["run"]["paper"]["uplink_bytes"] == content["run"]["paper"]["downlink_bytes"]
