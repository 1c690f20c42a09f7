"""The exported federated algorithms, and their variants: what every contract runs over."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.slow import first_then_slow
from lightning_sparsefl import algorithms

ALGORITHMS = [getattr(algorithms, name) for name in algorithms.__all__]
NARROW = {algorithms.SplitMix: {"bases": 2}}
"""Options for the 16 hidden units of the contracts' module, where the default leaves too little to learn with."""
VARIANTS = [
    *(algorithm(**NARROW.get(algorithm, {})) for algorithm in ALGORITHMS),
    algorithms.FedSpa(search="static", mask_init="different", layer_density="uniform", density=0.3),
    algorithms.FedSpa(mask_init="different", growth="random", merge="count", mask_pool="all"),
    algorithms.FedLPS(ratio="fixed", refresh="round", reduction="mean"),
    algorithms.FedLPS(ratio="capacity", pattern="rolling", dynamic=True, mu=0.1),
    algorithms.FedDIP(density=0.3, initial_density=1.0, reconfigure_every=1, penalty=0.01, mu=0.1, recover=False),
    algorithms.HeteroFL(rates=(0.5,), label_mask=True),
    algorithms.PerFedMask(base=algorithms.HeteroFL(rates=(0.5,))),
    algorithms.PerFedMask(base=algorithms.SplitMix(bases=2)),
]

every_algorithm = pytest.mark.parametrize("algorithm", [kind() for kind in ALGORITHMS], ids=lambda a: type(a).__name__)
"""Parametrise a test by all exported algorithms, at their defaults."""
every_variant = pytest.mark.parametrize("algorithm", first_then_slow(VARIANTS, by=type), ids=repr)
"""Parametrise a test by all variants; all but the first of each algorithm are slow."""


def rows(path: Path) -> list[dict[str, str]]:
    """Read a table without its timings."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
