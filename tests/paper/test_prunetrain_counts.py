"""Kept weights and traffic of PruneTrain in FedDIP's tables: the first and the last layer are not pruned."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

KEPT = {"fashion_mnist": 7_038}
"""Of LeNet-5's 61,470 weights: 150 and 840 of the first and the last layer, and a tenth of the 60,480 between them."""
DENSITIES = {"fashion_mnist": (0.5, 0.1), "cifar10": (0.5, 0.1), "cifar100": (0.95, 0.2)}


@pytest.fixture
def profile_of(profile) -> Callable[[str], Any]:
    return partial(profile, "feddip")


def weights(profile: Any) -> dict[str, int]:
    """Sizes of the layers' weights by name."""
    return {n: layer["size"] for n, layer in profile["layers"].items() if re.search(r"(conv|fc)\d?\.weight", n)}


def test_lenet_keeps_7038(profile_of):
    profile = profile_of("table3/fashion_mnist_prunetrain")
    sizes = list(weights(profile).values())
    assert (sum(sizes), sizes[0], sizes[-1]) == (61_470, 150, 840)
    assert sizes[0] + sizes[-1] + round(profile["final_density"] * sum(sizes[1:-1])) == KEPT["fashion_mnist"]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", DENSITIES)
def test_the_traffic_follows_the_schedule(data: str, profile_of):
    dense, sparse = (profile_of(f"table3/{data}_{method}")["run"]["paper"] for method in ("fedavg", "prunetrain"))
    first, last = DENSITIES[data]
    mean = sum(last + (first - last) * (1 - t / 1000) ** 3 for t in range(1000)) / 1000
    assert sparse["downlink_bytes"] / dense["downlink_bytes"] == pytest.approx(mean, rel=5e-3)
    assert mean < sparse["uplink_bytes"] / dense["uplink_bytes"] < mean + 0.03  # with the layers that are not pruned
