"""Counts of the papers' cells on Tiny-ImageNet, Reddit and DomainNet, which need no data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

PAPERS = Path(__file__).parents[2] / "configs" / "paper"
TINY = sorted(path.stem for path in (PAPERS / "fedlps/table1").glob("tiny_imagenet_*.yaml"))
REDDIT = sorted(path.stem for path in (PAPERS / "fedlps/table1").glob("reddit_*.yaml"))
OTHER_OPTIMIZER = ("reddit_fedrolex", "reddit_heterofl")
"""Cells in which the authors' program sets the momentum and the clipping itself, whatever its scripts say."""
DOMAINNET = sorted(path.stem for path in (PAPERS / "perfedmask/table7").glob("*.yaml"))
TRAINABLE = {
    "domainnet_fedavg": 57_063_498,
    "domainnet_fedprox": 57_063_498,
    "domainnet_fedbabu": 57_022_528,
    "domainnet_heterofl": 28_983_082,
    "domainnet_splitmix": 4_058_000,
}


def test_the_tables_have_the_same_rows_as_on_the_other_data_sets():
    rows = {path.stem.removeprefix("cifar100_") for path in (PAPERS / "fedlps/table1").glob("cifar100_*.yaml")}
    assert {cell.removeprefix("tiny_imagenet_") for cell in TINY} == rows
    assert {cell.removeprefix("reddit_") for cell in REDDIT} == rows


@pytest.mark.parametrize("cell", [*TINY, *REDDIT])
def test_a_cell_says_what_it_is(cell: str):
    first, second, *_ = (PAPERS / f"fedlps/table1/{cell}.yaml").read_text().splitlines()
    label = "Tiny-ImageNet" if cell.startswith("tiny") else "Reddit"
    assert first.startswith(f"# FedLPS (arXiv:2412.07216), Table I: {label}, ")
    assert re.fullmatch(r"# Published: accuracy [\d.]+, [\d.]+e12 FLOPs\.", second)


def test_printed_flops_of_the_dense_row_on_tiny_imagenet(profile: Callable[[str, str], Any]):
    found = profile("fedlps", "table1/tiny_imagenet_fedavg")
    assert f"{found['run']['paper']['flops'] / 1e12:.4f}" == "27080.9749"


@pytest.mark.slow
@pytest.mark.parametrize("cell", TINY)
def test_cells_on_tiny_imagenet_are_profiled(cell: str, profile: Callable[[str, str], Any]):
    found = profile("fedlps", f"table1/{cell}")
    assert found["parameters"] >= 15_132_936
    assert found["run"]["paper"]["flops"] > 0


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", REDDIT)
def test_cells_on_reddit_are_profiled(cell: str, profile: Callable[[str, str], Any]):
    found = profile("fedlps", f"table1/{cell}")
    assert found["parameters"] >= 2_845_392
    assert found["run"]["paper"]["flops"] > 0
    content = yaml.safe_load((PAPERS / f"fedlps/table1/{cell}.yaml").read_text())
    clip, momentum = (5.0, 0.0) if cell in OTHER_OPTIMIZER else (1.0, 0.5)
    assert content["trainer"]["gradient_clip_val"] == clip
    assert (content["model"]["init_args"]["lr"], content["model"]["init_args"]["momentum"]) == (8.0, momentum)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cell", DOMAINNET)
def test_parameters_of_the_domainnet_cells(cell: str, profile: Callable[[str, str], Any]):
    """Printed in millions; the optimum of PerFedMask's plan has fewer than the 31.221 M that the paper prints."""
    found = profile("perfedmask", f"table7/{cell}")
    header = (PAPERS / f"perfedmask/table7/{cell}.yaml").read_text().splitlines()[1]
    printed = re.search(r" ([\d.]+)M trainable parameters\.$", header)[1]
    trainable = found["client_round"]["paper"]["uplink_bytes"] / 4
    assert found["parameters"] == 57_063_498
    if cell == "domainnet_perfedmask":
        assert 0.9 < trainable / 31_221_000 < 1
    else:
        assert trainable == pytest.approx(TRAINABLE.get(cell, 57_063_498), rel=2e-4)
        assert printed in (f"{trainable / 1e6:.3f}", f"{int(trainable / 1000) / 1000:.3f}")
