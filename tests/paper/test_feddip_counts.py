"""Parameters, kept weights and traffic of FedDIP's published tables, from the command that a reader would type.

The paper's "MB" are Mibit: 1,000 rounds of FedAvg on LeNet-5 move 18,831 of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs" / "paper" / "feddip"
DOCUMENT = CONFIGS.parents[2] / "docs" / "paper_counts.md"
CELLS = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("table*/*.yaml"))
MIBIT = 2**20 / 8
"""Bytes."""

NETWORKS = {"fashion_mnist": "LeNet-5", "cifar10": "AlexNet", "cifar100": "ResNet-18"}
METHODS = {
    "fedavg": "FedAvg",
    "feddp": "FedDP",
    "feddip": "FedDIP",
    "fedprox": "FedProx",
    "feddip_prox": "FedDIP+Prox",
    "prunetrain": "PruneTrain",
    "snip": "SNIP",
    "feddst": "FedDST",
    "prunefl": "PruneFL",
}
PARAMETERS = {"fashion_mnist": 61_706, "cifar10": 23_272_266, "cifar100": 11_220_132}
TRAFFIC = {"fashion_mnist": "18831", "cifar10": "7.10e6", "cifar100": "3.42e6"}
"""Mibit of 1,000 dense rounds."""
KEPT = {"fashion_mnist": "6.1e3", "cifar10": "2.3e6", "cifar100": "2.2e6"}
"""Weights of the pruned layers in the end, as Table III prints them."""
EXACT = {"fashion_mnist": 6_147, "cifar10": 2_326_291, "cifar100": 2_207_680}
ALWAYS = {"fashion_mnist": 236, "cifar10": 9_354, "cifar100": 9_700 + 172_032}
"""Biases and norms, which have no mask, and of ResNet-18 the shortcuts, whose mask drops nothing at density .95."""
TABLES = {
    "table3": {
        "fashion_mnist": {"fedavg": "89.50", "feddp": "88.06", "feddip": "88.26", "prunetrain": "84.36"},
        "cifar10": {"fedavg": "85.07", "feddp": "84.81", "feddip": "85.14", "prunetrain": "79.73"},
        "cifar100": {"fedavg": "70.92", "feddp": "69.23", "feddip": "69.67", "prunetrain": "69.39"},
    },
    "table4": {
        "fashion_mnist": {"fedavg": "86.76", "feddp": "86.54", "feddip": "86.62", "prunetrain": "82.68"},
        "cifar10": {"fedavg": "78.98", "feddp": "82.29", "feddip": "82.58", "prunetrain": "78.16"},
        "cifar100": {"fedavg": "70.06", "feddp": "69.10", "feddip": "69.57", "prunetrain": "69.42"},
    },
    "table5": {
        "fashion_mnist": {"fedavg": "76.42", "fedprox": "76.63", "feddip_prox": "74.49"},
        "cifar10": {"fedavg": "61.59", "fedprox": "65.74", "feddip_prox": "60.47"},
        "cifar100": {"fedavg": "16.44", "fedprox": "18.48", "feddip_prox": "19.22"},
    },
}
"""Accuracies, of the methods that exist here."""
PRUNED = {
    "snip": {"table3": ("86.08", "80.10", "51.46"), "table4": ("86.32", "80.11", "51.63")},
    "prunefl": {"table3": ("86.00", "81.64", "68.17"), "table4": ("85.57", "81.73", "68.4")},
    "feddst": {"table3": ("80.37", "-", "68.06"), "table4": ("80.37", "-", "68.06")},
}
"""Accuracies of other pruning methods, in the order of `NETWORKS`."""
for method, rows in PRUNED.items():
    for table, row in rows.items():
        for data, accuracy in zip(NETWORKS, row, strict=True):
            TABLES[table][data][method] = accuracy
COUNTED = [f"table3/{data}_{method}" for data in NETWORKS for method in ("fedavg", "feddip")]


@pytest.fixture
def profile_of(profile) -> Callable[[str], Any]:
    return partial(profile, "feddip")


def parts(cell: str) -> tuple[str, str, str]:
    """Table, data set and method of a cell."""
    table, name = cell.split("/")
    data = next(key for key in NETWORKS if name.startswith(f"{key}_"))
    return table, data, name.removeprefix(f"{data}_")


def printed(value: float, like: str) -> str:
    """A number with the digits and the exponent of another one, such as ``7.10e6``."""
    mantissa, _, exponent = like.partition("e")
    digits = len(mantissa.partition(".")[2])
    return f"{value / 10 ** int(exponent or 0):.{digits}f}" + (f"e{exponent}" if exponent else "")


def kept(profile: Any) -> int:
    """Weights that the last mask keeps."""
    masked = sum(layer["size"] for name, layer in profile["layers"].items() if re.search(r"(conv|fc)\d?\.weight", name))
    return round(profile["final_density"] * masked)


def test_every_cell_of_a_method_that_exists_has_a_file():
    assert sorted(f"{t}/{d}_{m}" for t, cells in TABLES.items() for d, row in cells.items() for m in row) == CELLS


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_says_what_it_is(cell: str):
    table, data, method = parts(cell)
    text = (CONFIGS / f"{cell}.yaml").read_text()
    number = {"table3": "III", "table4": "IV", "table5": "V"}[table]
    first, second = text.splitlines()[:2]
    assert first.startswith(f"# FedDIP (arXiv:2309.06805), Table {number}: ")
    assert first.endswith(f" {NETWORKS[data]}, {'non-IID' if table == 'table5' else 'IID'}, {METHODS[method]}.")
    assert f"accuracy {TABLES[table][data][method]}" in second
    content = yaml.safe_load(text)
    assert ("partition" in content["data"]["init_args"]) == (table == "table5")
    assert content["algorithm"].get("init_args", {}).get("penalty") != 0.0 or method == "feddp"


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.startswith("table4")])  # the runs of table 3
def test_the_parameters(cell: str, profile_of):
    assert profile_of(cell)["parameters"] == PARAMETERS[parts(cell)[1]]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", NETWORKS)
def test_the_traffic_of_dense_rounds(data: str, profile_of):
    run = profile_of(f"table3/{data}_fedavg")["run"]
    assert printed(run["paper"]["bytes"] / MIBIT, TRAFFIC[data]) == TRAFFIC[data]
    assert run["paper"]["bytes"] == 2 * 4 * PARAMETERS[data] * 5 * 1000


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", NETWORKS)
def test_what_is_kept_in_the_end(data: str, profile_of):
    profile = profile_of(f"table3/{data}_feddip")
    shortcuts = ALWAYS[data] - 9_700 if data == "cifar100" else 0
    assert kept(profile) - shortcuts == EXACT[data]
    # 6,147 prints as 6.1e3, 2,326,291 as 2.3e6, 2,207,680 as 2.2e6
    assert printed(EXACT[data], KEPT[data]) == KEPT[data]


@pytest.mark.slow
def test_lenet_keeps_6383_with_its_biases(profile_of):
    assert kept(profile_of("table3/fashion_mnist_feddip")) + ALWAYS["fashion_mnist"] == 6_383


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", NETWORKS)
def test_a_round_down_costs_what_the_schedule_says(data: str, profile_of):
    dense, sparse = (profile_of(f"table3/{data}_{method}")["run"] for method in ("fedavg", "feddip"))
    assert sparse["paper"]["uplink_bytes"] == dense["paper"]["uplink_bytes"]
    first, last = (0.95, 0.2) if data == "cifar100" else (0.5, 0.1)
    mean = sum(last + (first - last) * (1 - t / 1000) ** 3 for t in range(1000)) / 1000
    share = sparse["paper"]["downlink_bytes"] / dense["paper"]["downlink_bytes"]
    assert share == pytest.approx(mean, rel=5e-3)  # profile takes the middle round of each twentieth
    assert sparse["wire"]["downlink_bytes"] - sparse["wire"]["mask_bytes"] == pytest.approx(
        sparse["paper"]["downlink_bytes"], rel=0.1
    )


@pytest.mark.parametrize("cell", CELLS)
def test_scores_are_taken_as_by_the_authors_program(cell: str):
    """In every round, since a fifth of them end with a new mask; Table V's clients share out the test set."""
    content = yaml.safe_load((CONFIGS / f"{cell}.yaml").read_text())
    options = content["data"]["init_args"]
    assert content["trainer"]["check_val_every_n_round"] == 1
    assert options.get("normalization") == ("unit" if "fashion_mnist" in cell else None)
    assert options.get("test_per_client") == (200 if "table5" in cell else None)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", COUNTED)
def test_the_document_says_what_the_command_prints(cell: str, profile_of):
    (row,) = (line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| `{cell}` |"))
    *counted, down, up = row.strip("| ").split(" | ")
    *ours, our_down, our_up = document_row(cell, profile_of(cell)).strip("| ").split(" | ")
    assert counted == ours
    travelled = [[float(number.replace(",", "")) for number in pair] for pair in ((down, up), (our_down, our_up))]
    assert travelled[0] == pytest.approx(travelled[1], rel=1e-3)


def document_row(cell: str, profile: Any) -> str:
    """A line of ``docs/paper_counts.md``."""
    _, data, method = parts(cell)
    dense = method == "fedavg"
    run, weights = profile["run"], profile["parameters"] if dense else kept(profile)
    theirs = {"fashion_mnist": ("62K", "6.1K"), "cifar10": ("23.3M", "2.3M"), "cifar100": ("11.2M", "2.2M")}[data]
    wire = [run["wire"][key] / MIBIT for key in ("downlink_bytes", "uplink_bytes")]
    counts = (run["paper"]["bytes"] / MIBIT, run["analytic"]["flops"] / 1e12, *wire)
    cells = (f"`{cell}`", theirs[0 if dense else 1], f"{weights:,}", *(f"{count:,.0f}" for count in counts))
    return "| " + " | ".join(cells) + " |"
