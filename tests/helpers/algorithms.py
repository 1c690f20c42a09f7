"""The exported federated algorithms, and their variants: what every contract runs over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from helpers.slow import first_then_slow
from lightning_sparsefl import algorithms

ALGORITHMS = [getattr(algorithms, name) for name in algorithms.__all__]
NARROW = {
    algorithms.FLASC: {"server_lr": 0.05},  # five rounds are too few for steps of 0.001
    algorithms.FLASH: {"density": 0.3, "first_epochs": 2},
    algorithms.SparsyFed: {"density": 0.5},
    algorithms.ScaleFL: {"widths": (0.5, 1.0)},
    algorithms.SplitMix: {"bases": 2},
    algorithms.PFedMe: {"lam": 5.0},  # times the module's learning rate, .1, below 1
    algorithms.FedP3: {"owned": 1},
    algorithms.FedSelect: {"alternations": 2, "every": 1},
    algorithms.FedMef: {"density": 0.3},
    algorithms.FedRTS: {"density": 0.3},
}
"""Options for the few hidden units and layers of the contracts' modules, where the default leaves too little to learn
with, or nothing to do."""
VARIANTS = [
    *(algorithm(**NARROW.get(algorithm, {})) for algorithm in ALGORITHMS),
    algorithms.FIARSE(scope="layer", boost=False),
    algorithms.FLASH(form="JMWST", density=0.3, first_epochs=1, exchange=0.5, merge="count"),
    algorithms.FLASH(form="JMWST", density=0.4, first_epochs=1, exchange=0.5, move_every=2),
    algorithms.FLASH(hetero=True, density=0.4, first_epochs=1, merge="count"),
    algorithms.FLASH(hetero=True, density=0.4, first_epochs=1, form="JMWST", sensitivity="weights"),
    algorithms.FedSpa(search="static", mask_init="different", layer_density="uniform", density=0.3),
    algorithms.FedSpa(mask_init="different", growth="random", merge="count", mask_pool="all"),
    algorithms.DisPFL(topology="ring", mask_init="same", growth="random", mask_pool="all"),
    algorithms.DisPFL(topology="full", density="capacity", search="static", layer_density="uniform"),
    algorithms.FedLPS(ratio="fixed", refresh="round", reduction="mean"),
    algorithms.FedLPS(ratio="capacity", pattern="rolling", dynamic=True, mu=0.1),
    algorithms.FedDIP(density=0.3, initial_density=1.0, reconfigure_every=1, penalty=0.01, mu=0.1, recover=False),
    algorithms.CS(upload="largest", kappa=1.0, prune_head=True),
    algorithms.FedNova(mu=0.1),
    algorithms.FedNova(variant="local_lr"),
    algorithms.FedOpt(rule="yogi", start="mean"),
    algorithms.HeteroFL(rates=(0.5,), label_mask=True),
    algorithms.Subsampling(fraction=0.3, scale=False),
    algorithms.LGFedAvg(layers_shared=1),
    algorithms.FedP3(owned=1, keep=1.0, head="shared"),
    algorithms.FedP3(owned=1, local_pruning="uniform"),
    algorithms.FedSelect(alternations=1, every=1, rate=0.6, sparse_download=True),
    algorithms.FD(rate="capacity", per="round"),
    algorithms.FedRolex(rates=(0.5,), label_mask=True, direction="back"),
    algorithms.FjORD(rates=(0.25, 0.5, 1.0), distill=True),
    algorithms.FLASC(adapters=("*lora*", "head"), whole=(), frozen=("*lora_A*",), server_lr=0.05),
    algorithms.SparsyFed(density=0.4, prune_activations=False),
    algorithms.FedMP(ratio=0.4),
    algorithms.DepthFL(alpha=0.0, distill=False),
    algorithms.ScaleFL(widths=(0.25, 0.5), scaler=False, strength=1.0, temperature=1.0, warmup=0.0),
    algorithms.PerFedMask(base=algorithms.HeteroFL(rates=(0.5,))),
    algorithms.PerFedMask(base=algorithms.SplitMix(bases=2)),
    algorithms.SNIP(density=0.4, scored_by="one", dense_layers=("net.4.*",)),
    algorithms.FedDST(density=0.5, exchange=0.3, annealing="cosine", search_every=1, epochs_after_search=1),
    algorithms.Hermes(own=False, penalty=0.0, min_score=0.3),
    algorithms.LotteryFL(rewind=False, merge="mean", step=0.2),
    algorithms.PruneTrain(strength=0.05, threshold=0.05, reconfigure_every=2),
    algorithms.SubFedAvg(gate="train", min_score=0.2, last_step="full", votes="held"),
    algorithms.SubFedAvg(channels=True, density=0.5, min_score=0.3, penalty=0.01, min_channels=(4,)),
    algorithms.Ditto(lams=(0.1, 2.0), metric="val_acc", global_epochs=2, personal_epochs=1),
    algorithms.APFL(alpha=0.5, adaptive=True),
    algorithms.PFedMe(lam=2.0, steps=2, beta=2.0, decay=0.001),
    algorithms.PerFedAvg(alpha=0.1, order="hessian", adapt_steps=2),
    algorithms.FedMef(density=0.5, penalty=0.0, adjust_every=1, activation_density=0.5),
    algorithms.FedRTS(density=0.5, adjust_every=1, adjust_until=2),
    algorithms.PruneFL(first="erk", reconfigure_every=1),
    algorithms.PruneFL(criterion="cubic", first="snip", density=0.6, initial_density=0.8, reconfigure_every=2),
]

QUICK = frozenset(("FedSpa", "FedDIP", "PerFedMask", "FedLPS", "SplitMix", "SCAFFOLD"))
"""Methods whose contracts are part of a plain `pytest`: those the package is named for, one that fits several networks,
and one whose clients keep a memory; the others' are slow."""


def slow_but_quick(algorithms: Iterable[Any]) -> list[Any]:
    """Mark what is slow: all but the first variant of each method, and all methods that are not in `QUICK`."""
    firsts = {id(value) for value in first_then_slow(algorithms, by=type) if not hasattr(value, "marks")}
    return [
        each if id(each) in firsts and type(each).__name__ in QUICK else pytest.param(each, marks=pytest.mark.slow)
        for each in algorithms
    ]


def _named(algorithms: Iterable[Any]) -> Any:
    return pytest.mark.parametrize("algorithm", algorithms, ids=lambda a: type(a).__name__)


every_exported = _named(VARIANTS[: len(ALGORITHMS)])
"""Parametrise a quick test by all exported algorithms, at their defaults but for those of `NARROW`."""
every_algorithm = _named(slow_but_quick(VARIANTS[: len(ALGORITHMS)]))
"""The same for a test that trains; methods outside `QUICK` are slow."""
each_kind = _named([each for each in VARIANTS[: len(ALGORITHMS)] if type(each).__name__ in QUICK])
"""Parametrise a test by one method for each kind of client work."""
every_variant = pytest.mark.parametrize("algorithm", slow_but_quick(VARIANTS), ids=repr)
"""Parametrise a test that trains by all variants; all but the first of each method in `QUICK` are slow."""
