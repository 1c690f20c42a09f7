"""Cells of figures: each is a cell of a table but for what the figure varies."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

PAPERS = Path(__file__).parents[2] / "configs" / "paper"
LEVELS = {"low": [1.0, 0.5], "median": [1.0, 0.5, 0.25]}
DENSITIES = {"fashion_mnist": (0.05, 0.01), "cifar10": (0.05, 0.01), "cifar100": (0.1, 0.05)}
VARIED = {
    **{
        f"fedlps/figure7/cifar10_{name}_fedlps": ("fedlps/table1/cifar10_fedlps", {"levels": levels})
        for name, levels in LEVELS.items()
    },
    **{
        f"fedspa/figure6/cifar100_{split}_fedspa_{search}_different": (
            f"fedspa/table1/cifar100_{split}_fedspa_{search}",
            {"mask_init": "different"},
        )
        for split in ("iid", "a", "b")
        for search in ("dst", "static")
    },
    **{
        f"fedspa/figure7/cifar100_{split}_random_growth": (
            f"fedspa/table1/cifar100_{split}_fedspa_dst",
            {"growth": "random"},
        )
        for split in ("iid", "a", "b")
    },
    **{
        f"feddip/figure6/{data}_density{density}": (f"feddip/table3/{data}_feddip", {"density": density})
        for data, densities in DENSITIES.items()
        for density in densities
    },
}


def content(cell: str) -> dict:
    return yaml.safe_load((PAPERS / f"{cell}.yaml").read_text())


def test_every_cell_of_a_figure_is_listed():
    found = {str(path.relative_to(PAPERS).with_suffix("")) for path in PAPERS.glob("*/figure*/*.yaml")}
    assert found == set(VARIED)


@pytest.mark.parametrize("cell", VARIED)
def test_a_cell_varies_what_its_figure_varies(cell: str):
    base, options = VARIED[cell]
    expected, found = content(base), content(cell)
    if "levels" in options:  # clients that are never drawn are scored at the capacities of the federation
        expected["federation"]["capacities"] = options["levels"]
    assert found != expected
    expected["algorithm"]["init_args"].update(options)
    assert found == expected


@pytest.mark.parametrize("cell", VARIED)
def test_a_cell_says_what_it_is(cell: str):
    paper, figure, _ = cell.split("/")
    number = figure.removeprefix("figure")
    names = {"fedlps": "FedLPS (arXiv:2412.07216), Figures", "fedspa": "FedSpa (arXiv:2201.11380), Figure"}
    start = names.get(paper, "FedDIP (arXiv:2309.06805), Figure")
    assert (PAPERS / f"{cell}.yaml").read_text().startswith(f"# {start} {number}")
