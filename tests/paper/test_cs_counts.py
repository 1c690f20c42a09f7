"""FLOPs of CS in FedLPS's Table I: one dense round, and 99 in which half of each layer but the last is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs" / "paper" / "fedlps" / "table1"
PRINTED = {"cifar10": ("417.0", "417.03"), "cifar100": ("2493.7", "2493.69")}
"""TFLOP as printed, and as counted."""


@pytest.mark.parametrize("data", ["mnist", *PRINTED])
def test_a_cell_is_fedavgs_with_the_published_variant(data):
    cell, dense = (yaml.safe_load((CONFIGS / f"{data}_{method}.yaml").read_text()) for method in ("cs", "fedavg"))
    options = {"density": 0.5, "upload": "largest", "kappa": 1.0}
    assert cell.pop("algorithm") == {"class_path": "CS", "init_args": options}
    assert dense.pop("algorithm") == {"class_path": "FedAvg"}
    assert cell == dense


@pytest.mark.slow
@pytest.mark.parametrize("data", PRINTED)
def test_printed_flops(data, profile):
    printed, counted = PRINTED[data]
    sparse, dense = (profile("fedlps", f"table1/{data}_{method}")["run"]["paper"] for method in ("cs", "fedavg"))
    flops = (dense["flops"] + 99 * sparse["flops"]) / 100 / 1e12
    assert f"{flops:.2f}" == counted
    assert f"{flops:.1f}" == printed


@pytest.mark.slow
def test_down_and_up_are_one_dense_model(profile):
    sparse, dense = (
        profile("fedlps", f"table1/mnist_{method}")["client_round"]["paper"] for method in ("cs", "fedavg")
    )
    spared = 4 * (10 * 50 + 10 + 50 + 20 + 10)  # the last layer and the biases travel both ways
    assert sparse["downlink_bytes"] + sparse["uplink_bytes"] == dense["downlink_bytes"] + spared
