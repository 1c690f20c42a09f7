"""Bytes and FLOPs of Sub-FedAvg in FedSpa's tables: its masks follow from training, so that only bounds are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs" / "paper" / "fedspa"
CELLS = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("table1/*_sub_fedavg.yaml"))
PRINTED = {
    "emnist_letters_iid": ("90.7", "9.5", "1.9e14"),
    "emnist_letters_a": ("94.9", "9.4", "1.9e14"),
    "emnist_letters_b": ("96.4", "9.4", "1.9e14"),
    "cifar10_iid": ("71.8", "410.2", "121.4e14"),
    "cifar10_a": ("78.3", "424.7", "120.6e14"),
    "cifar10_b": ("79.6", "416.9", "119.8e14"),
    "cifar100_iid": ("38.3", "616.5", "494.1e14"),
    "cifar100_a": ("49.2", "624.4", "508.4e14"),
    "cifar100_b": ("55.0", "612.8", "496.1e14"),
}
"""Accuracy, GB and FLOPs."""


@pytest.fixture
def profile_of(profile) -> Callable[[str], Any]:
    return partial(profile, "fedspa")


def test_every_row_has_a_cell():
    assert sorted(f"table1/{row}_sub_fedavg" for row in PRINTED) == CELLS


@pytest.mark.parametrize("row", PRINTED)
def test_a_cell_says_what_it_is_and_has_the_settings_of_the_dense_row(row: str):
    cell, dense = (CONFIGS / "table1" / f"{row}_{method}.yaml" for method in ("sub_fedavg", "fedavg"))
    first, second, *_ = cell.read_text().splitlines()
    accuracy, gigabytes, flops = PRINTED[row]
    assert first == dense.read_text().splitlines()[0].replace("FedAvg.", "Sub-FedAvg.")
    assert second == f"# Published: accuracy {accuracy}, {gigabytes} GB, {flops} FLOPs."
    ours, theirs = (yaml.safe_load(path.read_text()) for path in (cell, dense))
    assert ours.pop("algorithm")["class_path"] == "SubFedAvg"
    del theirs["algorithm"]
    assert ours == theirs


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", ["emnist_letters", "cifar10", "cifar100"])
def test_clients_that_always_prune_cost_less_than_the_published_ones(data: str, profile_of):
    """In a profile all gates are open, which bounds the published bytes from below."""
    ours, dense = (profile_of(f"table1/{data}_iid_{method}")["run"]["paper"] for method in ("sub_fedavg", "fedavg"))
    assert 0.5 < ours["bytes"] / dense["bytes"] < 0.75
    assert ours["bytes"] / 1e9 < float(PRINTED[f"{data}_iid"][1])
    assert 0.5 < ours["flops"] / dense["flops"] < 0.75


@pytest.mark.slow
def test_on_cifar10_the_flops_are_within_two_percent_of_the_published_ones(profile_of):
    flops = profile_of("table1/cifar10_iid_sub_fedavg")["run"]["paper"]["flops"]
    assert all(
        flops == pytest.approx(float(PRINTED[row][2]), rel=0.02) for row in ("cifar10_iid", "cifar10_a", "cifar10_b")
    )
