"""FLOPs of Per-FedAvg in Table I of FedLPS: two gradients for each batch, of fewer rounds than the table's 100."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

TABLE = Path(__file__).parents[2] / "configs" / "paper" / "fedlps" / "table1"
ROUNDS = {"cifar10": 40, "cifar100": 33}
"""Of 100, by the printed figures."""


def printed(cell: str) -> float:
    header = (TABLE / f"{cell}.yaml").read_text().splitlines()[1]
    return float(re.search(r", ([\d.]+)e12 ", header)[1])


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", ROUNDS)
def test_the_printed_figures_are_whole_rounds_of_two_gradients(data, profile):
    cell, dense = (profile("fedlps", f"table1/{data}_{each}")["run"] for each in ("per_fedavg", "fedavg"))
    assert cell["paper"] == dense["paper"]  # a pair has two gradients, one for each of its batches
    assert cell["wire"] == dense["wire"]
    share = 2 * ROUNDS[data] / 100
    assert f"{share * dense['paper']['flops'] / 1e12:.1f}" == f"{printed(f'{data}_per_fedavg'):.1f}"


@pytest.mark.parametrize("data", ["mnist", *ROUNDS])
def test_the_cell_is_that_of_fedavg_but_for_the_method(data):
    cell, dense = (yaml.safe_load((TABLE / f"{data}_{each}.yaml").read_text()) for each in ("per_fedavg", "fedavg"))
    assert cell.pop("algorithm") == {"class_path": "PerFedAvg", "init_args": {"alpha": 0.0}}
    assert cell["federation"].pop("finetune_epochs") == 5
    del dense["algorithm"]
    assert cell == dense
