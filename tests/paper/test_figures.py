"""Cells of figures: each is a cell of a table but for what the figure varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        f"fedlps/figure6/mnist_lacks{lacks}_{method}": (
            f"fedlps/table1/mnist_{method}",
            {"classes_per_client": 10 - lacks},
        )
        for lacks in (2, 4, 6)
        for method in ("fedlps", "fedspa")
    },
    **{
        f"fedlps/figure9/mnist_{pattern}_density{density}": (
            "fedlps/table2/mnist_flst",
            {"density": density, **({} if pattern == "learned" else {"pattern": pattern})},
        )
        for pattern in ("learned", "magnitude", "ordered", "random")
        for density in (0.2, 0.4, 0.6, 0.8)
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
    if "levels" in options:  # of which each round draws all capacities anew
        del expected["federation"]["capacities"], expected["federation"]["shuffle_capacities"]
    assert found != expected
    classes = {name: options[name] for name in options if name == "classes_per_client"}
    if classes:
        expected["data"]["init_args"]["partition"]["init_args"].update(classes)
    else:
        expected["algorithm"]["init_args"].update(options)
    assert found == expected


@pytest.mark.parametrize("cell", VARIED)
def test_a_cell_says_what_it_is(cell: str):
    paper, figure, _ = cell.split("/")
    number = figure.removeprefix("figure")
    names = {
        "fedlps": "FedLPS (arXiv:2412.07216)",
        "fedspa": "FedSpa (arXiv:2201.11380)",
        "feddip": "FedDIP (arXiv:2309.06805)",
    }
    word = "Figures 7 and 8" if (paper, number) == ("fedlps", "7") else f"Figure {number}"
    assert (PAPERS / f"{cell}.yaml").read_text().startswith(f"# {names[paper]}, {word}: ")


def paper_flops(profiled: Any, cell: str) -> float:
    flops = profiled(*cell.split("/", 1))["run"]["paper"]["flops"]
    assert flops > 0
    return flops


@pytest.mark.slow
@pytest.mark.parametrize("cell", VARIED)
def test_a_cell_is_profiled_and_costs_as_what_it_varies_says(cell: str, profile):
    base, options = VARIED[cell]
    ours, theirs = paper_flops(profile, cell), paper_flops(profile, base)
    if "density" in options:
        asked, there = options["density"], content(base)["algorithm"]["init_args"]["density"]
        assert (ours > theirs) == (asked > there)
        assert ours != theirs
    elif "levels" not in options:  # of which a profile draws a few only
        assert ours == pytest.approx(theirs, rel=0.01)
