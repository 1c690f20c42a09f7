"""Parameters and FLOPs of FedLPS's published tables: outgoing rows only, and the last batch of a client in full."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.slow import first_then_slow
from lightning_sparsefl.cost import count_layers, forward_flops
from lightning_sparsefl.models import VGG11, VGG13, VGG16, MNISTNet

CONFIGS = Path(__file__).parents[2] / "configs" / "paper" / "fedlps"
DOCUMENT = CONFIGS.parents[2] / "docs" / "paper_counts.md"
CELLS = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("table*/[mc]*.yaml"))
"""Cells on MNIST and CIFAR; those on data that are read as published: test_published_formats_counts.py."""
PARAMETERS = {"mnist": 21_840, "cifar10": 9_231_114, "cifar100": 9_462_180}
EXITS = {"mnist": 4_820, "cifar10": 1_182_750, "cifar100": 1_321_260}
"""Parameters of the exits before the last one, which DepthFL adds."""
LABELS = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
METHODS = {
    "table1": {
        "fedavg": "FedAvg",
        "fedprox": "FedProx",
        "fedspa": "FedSpa",
        "fedlps": "FedLPS",
        "fedper": "FedPer",
        "fedrep": "FedRep",
        "fedp3": "FedP3",
        "lotteryfl": "LotteryFL",
        "efd": "eFD",
        "fjord": "FjORD",
        "heterofl": "HeteroFL",
        "fedrolex": "FedRolex",
        "ditto": "Ditto",
        "cs": "CS",
        "per_fedavg": "Per-FedAvg",
        "fedmp": "FedMP",
        "oort": "Oort",
        "refl": "REFL",
        "hermes": "Hermes",
        "depthfl": "DepthFL",
    },
    "table2": {
        "flst": "FLST",
        "rcr_fix": "RCR-Fix",
        "rcr_dyn": "RCR-Dyn",
        "pucbv_fix": "P-UCBV-Fix",
        "pucbv_dyn": "P-UCBV-Dyn",
    },
}
METHODS["table1"] |= {"prunefl": "PruneFL"}
COUNTED = {
    "table1/cifar10_fedavg": ("825.4", "825.3647"),
    "table1/cifar100_fedavg": ("4934.3", "4934.2622"),
    "table2/cifar10_flst": ("412.9", "412.9008"),
    "table2/mnist_flst": ("1.4", "1.4057"),
}
"""FLOPs in 1e12 as printed, and as counted. MNIST's dense rows charge 192 samples for a client's 180."""


DOCUMENTED = [
    *("table1/mnist_fedavg", "table1/mnist_fedspa", "table1/cifar10_fedavg", "table1/cifar10_fedspa"),
    *("table1/cifar100_fedavg", "table2/mnist_flst", "table2/cifar10_flst"),
    *("table1/mnist_ditto", "table1/cifar10_ditto", "table1/cifar100_ditto"),
    *("table1/mnist_cs", "table1/cifar10_cs", "table1/cifar100_cs"),
    *("table1/mnist_per_fedavg", "table1/cifar10_per_fedavg", "table1/cifar100_per_fedavg"),
]
"""Cells whose costs follow from no random draw."""


@pytest.fixture
def profile_of(profile) -> Callable[[str], Any]:
    return partial(profile, "fedlps")


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_says_what_it_is(cell: str):
    table, name = cell.split("/")
    data, _, method = name.partition("_")
    first, second, *_ = (CONFIGS / f"{cell}.yaml").read_text().splitlines()
    numeral = {"table1": "I", "table2": "II"}[table]
    assert first == f"# FedLPS (arXiv:2412.07216), Table {numeral}: {LABELS[data]}, {METHODS[table][method]}."
    assert re.fullmatch(r"# Published: accuracy [\d.]+, [\d.]+e12 FLOPs\.", second)
    if cell in COUNTED:
        assert f", {COUNTED[cell][0]}e12 " in second


def test_every_row_has_a_cell():
    sets = {"table1": LABELS, "table2": ("mnist", "cifar10")}
    assert sorted(f"{t}/{d}_{m}" for t, methods in METHODS.items() for m in methods for d in sets[t]) == CELLS


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", COUNTED)
def test_printed_flops(cell: str, profile_of):
    printed, counted = COUNTED[cell]
    profile = profile_of(cell)
    flops = profile["run"]["paper"]["flops"] / 1e12
    assert profile["parameters"] == PARAMETERS[cell.split("/")[1].split("_")[0]]
    assert f"{flops:.4f}" == counted
    assert f"{flops:.1f}" == printed


@pytest.mark.parametrize("cell", first_then_slow(DOCUMENTED, by=lambda cell: not cell.startswith("table1/mnist")))
def test_the_document_says_what_the_command_prints(cell: str, profile_of):
    run, head = profile_of(cell)["run"], (CONFIGS / f"{cell}.yaml").read_text().splitlines()[1]
    printed = re.search(r"([\d.]+)e12", head).group(1)
    flops = " | ".join(f"{run[column]['flops'] / 1e12:.2f}" for column in ("paper", "analytic"))
    assert f"| `{cell}` | {printed} | {flops} |" in DOCUMENT.read_text().splitlines()


def test_the_data_are_prepared_as_by_the_authors_program():
    """No augmentation; CIFAR in [-1, 1], MNIST by its mean and deviation; batches of 32 and 20."""
    for cell in CELLS:
        options = yaml.safe_load((CONFIGS / f"{cell}.yaml").read_text())["data"]["init_args"]
        mnist = "mnist" in cell
        assert options["batch_size"] == (32 if mnist else 20)
        assert mnist or (options["normalization"], options["augment"]) == ("half", False)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("model", "samples", "flops"),
    [
        (MNISTNet(), 192, "2.788128"),
        (VGG11(norm="batch_static"), 180, "825.3647"),
        (VGG13(100, norm="batch_static"), 720, "4934.2622"),
        (VGG16(200, (3, 64, 64), norm="batch_static"), 720, "27080.9749"),
    ],
    ids=["MNIST", "CIFAR-10", "CIFAR-100", "Tiny-ImageNet"],
)
def test_dense_rows_of_table_1(model, samples, flops):
    """10 clients, 100 rounds, 5 epochs, three forward passes."""
    forward = forward_flops(count_layers(model, torch.zeros(1, *model.hparams.sample_shape)))
    total = 10 * 100 * 5 * 3 * samples * forward / 1e12
    assert f"{total:.{len(flops.partition('.')[2])}f}" == flops


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_costs_at_most_what_its_dense_row_does(cell: str, profile_of):
    table, data = cell.partition("_")[0].split("/")
    profile, dense = profile_of(cell), profile_of(f"table1/{data}_fedavg")
    assert dense["parameters"] == PARAMETERS[data]
    assert profile["parameters"] == PARAMETERS[data] + EXITS.get(data, 0) * cell.endswith("depthfl")
    models = 2 if cell.endswith("_ditto") else 1
    assert 0 < profile["run"]["paper"]["flops"] <= models * dense["run"]["paper"]["flops"]
    if table == "table2":
        assert profile["run"]["paper"]["uplink_bytes"] < dense["run"]["paper"]["uplink_bytes"]


@pytest.mark.slow
def test_a_cut_sub_model_costs_less_than_the_paper_counts(profile_of):
    """Its layers read fewer channels too."""
    run = profile_of("table2/cifar10_flst")["run"]
    probe = 100 * 10 * 3 * 20 * 825.3647e12 / (10 * 100 * 5 * 3 * 180)
    assert 0.25 < (run["analytic"]["flops"] - probe) / 825.3647e12 < 0.26
    assert run["wire"]["uplink_bytes"] - run["wire"]["mask_bytes"] < 0.51 * run["paper"]["uplink_bytes"]


@pytest.mark.slow
def test_adaptive_densities_cost_less_than_capacities(profile_of):
    """Table II: a bandit's density is at most the capacity; before it has learned, .66 of it on average."""
    for devices in ("fix", "dyn"):
        bandit, rigid = (
            profile_of(f"table2/mnist_{rule}_{devices}")["run"]["paper"]["flops"] for rule in ("pucbv", "rcr")
        )
        assert 0.54 < bandit / rigid < 0.78
        assert 1.0e12 < rigid < 1.2e12


def test_the_bandit_s_run_in_table_1_is_that_of_table_2():
    for data in ("mnist", "cifar10"):
        one, other = (
            yaml.safe_load((CONFIGS / cell).read_text())
            for cell in (f"table1/{data}_fedlps.yaml", f"table2/{data}_pucbv_dyn.yaml")
        )
        assert one == other
