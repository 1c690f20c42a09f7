"""What every callback promises: alike in a Trainer and in a client, exact, resumable, and gone without a trace."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from fnmatch import fnmatch
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import Adam

from helpers.slow import first_then_slow
from lightning_sparsefl import callbacks
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.testing import callback_checks as checks
from lightning_sparsefl.testing.small_fit import BATCHES, EPOCHS, Net, SmallFit, momentum, no_companions

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*never moves its mask.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
]


def unit_groups(parameters: Any) -> Any:
    """The groups of units of the module below."""
    return find_groups(nn.Sequential(OrderedDict(net=Net().net)), torch.zeros(1, 5))


EXPORTED = {name: getattr(callbacks, name) for name in callbacks.__all__}
BY_DEFAULT = {
    name: (kind, {})
    for name, kind in EXPORTED.items()
    if all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StaticMask, uniform": (callbacks.StaticMask, {"density": 0.3, "layer_density": "uniform", "layers": "!net.0*"}),
    "StaticMask, by layer": (callbacks.StaticMask, {"density": 0.3, "layer_density": {"net.4*": 0.5, "net.5*": 1.0}}),
    "DynamicMask, RigL": (callbacks.DynamicMask, {"density": 0.3, "every_n_steps": 3}),
    "DynamicMask, SET": (callbacks.DynamicMask, {"growth": "random", "every_n_steps": 2, "layer_density": "uniform"}),
    "GradualPruning, steps": (callbacks.GradualPruning, {"start": 0.1, "end": 0.9, "every_n_steps": 3}),
    "GradualPruning, global": (callbacks.GradualPruning, {"scope": "global", "every_n_steps": 2, "layers": "!net.0*"}),
    "GradualPruning, by layer": (
        callbacks.GradualPruning,
        {"every_n_steps": 2, "layer_density": {"net.0*": 0.6}, "layers": "type:Linear"},
    ),
    "NMPruning, late": (callbacks.NMPruning, {"n": 1, "m": 2, "start": 0.4, "layers": ["net.[45]*"]}),
    "GlobalMagnitudePruning, epochs": (callbacks.GlobalMagnitudePruning, {"fraction": 0.3, "epochs": [0, 1, 3]}),
    "DynamicPruningWithFeedback, late": (
        callbacks.DynamicPruningWithFeedback,
        {"start": 0.2, "end": 0.8, "every_n_steps": 2, "layers": ["net.*"]},
    ),
    "LotteryRewind, from the start, by layer": (
        callbacks.LotteryRewind,
        {"density": 0.1, "cycles": 3, "rewind": 0.0, "scope": "layer", "layers": "!net.0*"},
    ),
    "LearnedImportance, steps": (callbacks.LearnedImportance, {"density": 0.3, "lr": 1.0, "reduction": "mean"}),
    "LearnedImportance, rounds": (callbacks.LearnedImportance, {"refresh": "round", "probe": False, "lr": 1.0}),
    "LearnedImportance, magnitude": (callbacks.LearnedImportance, {"pattern": "magnitude", "layers": "!net.0*"}),
    "LearnedImportance, rolling": (callbacks.LearnedImportance, {"pattern": "rolling", "turn": 3, "density": 0.6}),
    "SparsityMonitor, seldom": (callbacks.SparsityMonitor, {"every_n_epochs": 3}),
    "OrderedDropout, distilled": (callbacks.OrderedDropout, {"rates": [0.3, 0.6], "seed": 2, "distill": True}),
    "GradientOffset": (callbacks.GradientOffset, {"offset": {"net.0.weight": torch.full((8, 5), 0.01)}}),
    "ProximalTerm, strong": (callbacks.ProximalTerm, {"strength": 0.5}),
    "GroupPenalty, steep": (callbacks.GroupPenalty, {"strength": 0.5, "stairs": 5, "layers": "!net.0*"}),
    "GroupPenalty, level": (callbacks.GroupPenalty, {"strength": 0.1, "stairs": None}),
    "GroupPenalty, units": (callbacks.GroupPenalty, {"groups": "units", "units": unit_groups}),
    "GroupPenalty, scales": (callbacks.GroupPenalty, {"groups": "scales", "strength": 0.1}),
    "EpochSnapshots": (callbacks.EpochSnapshots, {"epochs": (1, 4)}),
    "StepMeter": (callbacks.StepMeter, {"mu": 0.1}),
    "PersonalMixture": (callbacks.PersonalMixture, {"alpha": 0.4}),
    "PersonalMixture, adaptive": (
        callbacks.PersonalMixture,
        {"alpha": 0.4, "adaptive": True, "personal": {"net.0.weight": torch.full((8, 5), 0.1)}},
    ),
    "MoreauEnvelope": (callbacks.MoreauEnvelope, {"strength": 2.0, "lr": 0.1, "steps": 3, "decay": 0.01}),
    "MetaStep": (callbacks.MetaStep, {"lr": 0.1}),
    "MetaStep, hessian": (callbacks.MetaStep, {"lr": 0.1, "order": "hessian"}),
}
CASES = {**BY_DEFAULT, **VARIANTS}
MASKING = {name: case for name, case in CASES.items() if issubclass(case[0], MaskingCallback)}


def adam(parameters: Any) -> Any:
    return Adam(parameters, 0.02, weight_decay=0.01)


def steps_of_epoch(accumulate: int) -> int:
    return math.ceil(BATCHES / accumulate)


class Promise(Callback):
    """After every batch: exactly as many weights are kept as the callback's options say, and no other is there."""

    def __init__(self, callback: MaskingCallback) -> None:
        self.callback, self.step, self.batches, self.last = callback, 0, 0, 0
        self.kept: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step, self.last = self.step + (trainer.global_step != self.last), trainer.global_step
        self.batches += 1
        masks = self.callback.masks
        counts = {name: int(mask.sum()) for name, mask in masks.items()}
        promised = PROMISES[type(self.callback)](
            self.callback,
            {name: tuple(mask.shape) for name, mask in masks.items()},
            (self.step, EPOCHS * steps_of_epoch(trainer.accumulate_grad_batches), trainer.current_epoch),
            self.kept,
        )
        assert (counts if isinstance(promised, dict) else sum(counts.values())) == promised, self.step
        self.kept = promised
        for name, mask in masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            # a grown weight is zero at first, and so is a norm's bias
            if not isinstance(self.callback, callbacks.DynamicMask) and weight.dim() > 1:
                assert weight[mask].all()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.batches == EPOCHS * BATCHES


def drawn(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    return kept_counts(shapes, spread(callback, shapes))


def spread(callback: Any, shapes: Any) -> Any:
    rule = getattr(callback, "layer_density", "uniform")
    if isinstance(rule, str):
        return {"erk": erk, "uniform": uniform}[rule](shapes, callback.density)
    said = {name: [value for pattern, value in rule.items() if fnmatch(name, pattern)] for name in shapes}
    return {name: values[0] if values else callback.density for name, values in said.items()}


def grouped(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    pruned = step >= math.floor(callback.start * total + 1e-6)
    return {name: size * callback.n // callback.m if pruned else size for name, size in sizes.items()}


def scheduled(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    first = math.floor(callback.start * total + 1e-6)
    last = math.ceil(callback.end * total - 1e-6)
    moves = [s for s in range(first, step + 1) if (s - first) % callback.every_n_steps == 0 or s == last]
    at = min(moves[-1], last) if moves else first
    left = (1 - (at - first) / (last - first)) ** 3
    share = callback.density + (1 - callback.density) * left
    if getattr(callback, "scope", "global") == "global":
        return math.floor(share * sum(sizes.values()) + 1e-6)
    final = spread(callback, shapes)
    shares = {name: final[name] + (1 - final[name]) * left for name in sizes}
    return {name: max(1, math.floor(shares[name] * size + 1e-6)) for name, size in sizes.items()}


def by_epoch(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    kept = sum(math.prod(shape) for shape in shapes.values())
    for _ in [epoch for epoch in callback.epochs if epoch <= when[2]]:
        kept -= math.ceil(callback.fraction * kept - 1e-6)
    return kept


def by_cycle(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    ends = callback.cycle_ends(total)
    share = callback.density ** (sum(end <= step for end in ends) / len(ends))
    if callback.scope == "global":
        return math.floor(share * sum(sizes.values()) + 1e-6)
    return {name: max(1, math.floor(share * size + 1e-6)) for name, size in sizes.items()}


def by_units(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    """A dropped unit of a hidden layer takes its row, its bias, its norm, and its reader's column along."""
    first, second = (max(1, math.floor(callback.density * size + 0.5)) for size in (8, 6))
    first = 8 if callback.layers else first
    kept = dict.fromkeys(("net.0.bias", "net.1.weight", "net.1.bias"), first) | {"net.4.bias": second}
    kept |= {"net.0.weight": 5 * first, "net.4.weight": first * second, "net.5.weight": 3 * second}
    return {name: kept[name] for name in shapes}


PROMISES = {
    callbacks.StaticMask: drawn,
    callbacks.DynamicMask: drawn,
    callbacks.GradualPruning: scheduled,
    callbacks.NMPruning: grouped,
    callbacks.DynamicPruningWithFeedback: scheduled,
    callbacks.GlobalMagnitudePruning: by_epoch,
    callbacks.LotteryRewind: by_cycle,
    callbacks.LearnedImportance: by_units,
}

RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum, clipped, accumulated": (momentum, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "adam, bf16": (adam, {"precision": "bf16-mixed"}),
}


def test_every_callback_takes_part():
    assert {kind.__name__ for kind, _ in CASES.values()} == set(EXPORTED) - {"LayerFreezing"}  # needs masks
    masking = {kind for kind in EXPORTED.values() if issubclass(kind, MaskingCallback)}
    assert masking == set(PROMISES) == {kind for kind, _ in MASKING.values()}


def made(case: str) -> Any:
    kind, arguments = CASES[case]
    return kind(**arguments)


@pytest.mark.slow_after_first("recipe")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_trains_in_a_client_as_in_a_trainer_and_density_is_as_promised(case, recipe, tmp_path):
    optimizer, options = RECIPES[recipe]
    promised = (lambda callback: [Promise(callback)]) if case in MASKING else no_companions
    bench = SmallFit(tmp_path, partial(Net, optimizer, dropout=0.2), options, promised)
    checks.trains_in_a_client_as_in_a_trainer(made(case), bench)


@pytest.mark.slow_after_first("recipe")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", first_then_slow(CASES, by=lambda case: CASES[case][0]))
def test_is_the_same_after_a_resume(case, recipe, tmp_path):
    optimizer, options = RECIPES[recipe]
    checks.is_the_same_after_a_resume(made(case), SmallFit(tmp_path, partial(Net, optimizer), options))


@pytest.mark.parametrize("case", CASES)
def test_saves_an_ordinary_checkpoint(case, tmp_path):
    checks.saves_an_ordinary_checkpoint(made(case), SmallFit(tmp_path))


@pytest.mark.parametrize("case", MASKING)
def test_keeps_masks_in_every_verb(case, tmp_path):
    checks.keeps_masks_in_every_verb(made(case), SmallFit(tmp_path))


@pytest.mark.slow_after_first("check")
@pytest.mark.parametrize(
    "check", [checks.holds_its_masks, checks.holds_masks_under_averaging, checks.fits_several_times]
)
@pytest.mark.parametrize("case", MASKING)
def test_holds_its_masks(case, check, tmp_path):
    """Under momentum and weight decay; with more averages, optimizers and fits: test_masks_hold.py."""
    check(made(case), SmallFit(tmp_path))


@pytest.mark.parametrize("case", MASKING)
def test_exports_without_zeros(case, tmp_path):
    """With a layer that is large enough for its zeros to matter in a file."""
    checks.exports_without_zeros(made(case), SmallFit(tmp_path, partial(Net, width=60)))


@pytest.mark.parametrize("case", MASKING)
def test_a_module_trains_on_in_a_second_fit(case, tmp_path):
    """Its masks stay where they are or lose weights; DPF's and the dynamic ones move, at the density they reached."""
    bench, module, callback = SmallFit(tmp_path), Net(), made(case)
    bench.fit(module, [callback])
    first = {name: mask.clone() for name, mask in callback.masks.items()}
    bench.fit(module, [callback])
    kept = [sum(int(mask.sum()) for mask in masks.values()) for masks in (first, callback.masks)]
    if isinstance(callback, callbacks.GlobalMagnitudePruning):
        assert kept[1] == by_epoch_from(kept[0], callback)
    else:
        assert kept[0] == kept[1]


def by_epoch_from(kept: int, callback: Any) -> int:
    for _ in callback.epochs:
        kept -= math.ceil(callback.fraction * kept - 1e-6)
    return kept
