"""Bytes and FLOPs of Ditto in the tables of FedSpa and FedLPS: those of FedAvg, and twice FedAvg's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

PAPERS = Path(__file__).parents[2] / "configs" / "paper"
FEDSPA = sorted(path.stem for path in (PAPERS / "fedspa" / "table1").glob("*_ditto.yaml"))
FEDLPS = {"mnist": None, "cifar10": "1650.8", "cifar100": "9868.6"}
"""FLOPs in 1e12 as printed: twice the rounded figure of the dense row. MNIST's charges full last batches."""


def content(paper, name):
    return yaml.safe_load((PAPERS / paper / "table1" / f"{name}.yaml").read_text())


def test_every_split_of_fedspa_has_a_cell():
    splits = [f"{data}_{split}_ditto" for data in ("cifar10", "cifar100", "emnist_letters") for split in "ab"]
    assert sorted([*splits, "cifar10_iid_ditto", "cifar100_iid_ditto", "emnist_letters_iid_ditto"]) == FEDSPA


@pytest.mark.parametrize("name", FEDSPA)
def test_the_two_models_of_fedspa_have_five_epochs_together(name):
    cell, dense = content("fedspa", name), content("fedspa", name.replace("ditto", "fedavg"))
    options = cell["algorithm"].pop("init_args")
    assert options == {"lam": 0.5, "global_epochs": 2, "personal_epochs": 3}
    assert options["global_epochs"] + options["personal_epochs"] == cell["trainer"]["max_epochs"] == 5
    dense["algorithm"]["class_path"] = "Ditto"
    assert cell == dense


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["emnist_letters_iid_ditto", "cifar10_iid_ditto", "cifar100_iid_ditto"])
def test_fedspa_charges_what_fedavg_costs(name, profile):
    cell, dense = (profile("fedspa", f"table1/{each}")["run"] for each in (name, name.replace("ditto", "fedavg")))
    assert cell == dense


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", FEDLPS)
def test_fedlps_charges_twice_what_fedavg_costs(data, profile):
    cell, dense = (profile("fedlps", f"table1/{data}_{each}")["run"] for each in ("ditto", "fedavg"))
    for column in ("paper", "analytic"):
        assert cell[column]["flops"] == 2 * dense[column]["flops"]
        assert cell[column].get("bytes") == dense[column].get("bytes")
    assert cell["wire"] == dense["wire"]
    if FEDLPS[data]:
        rounded = round(dense["paper"]["flops"] / 1e12, 1)
        assert f"{2 * rounded:.1f}" == FEDLPS[data]
        header = (PAPERS / "fedlps" / "table1" / f"{data}_ditto.yaml").read_text().splitlines()[1]
        assert re.search(r", ([\d.]+)e12 ", header)[1] == FEDLPS[data]
