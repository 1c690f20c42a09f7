"""Which callbacks act on a stack as one, and by which counterpart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_sparsefl.callbacks.activation_pruning import ActivationPruning
from lightning_sparsefl.callbacks.budget_aware_extrusion import BudgetAwareExtrusion
from lightning_sparsefl.callbacks.exits import EarlyExits, TaughtExits
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.gradient_offset import GradientOffset
from lightning_sparsefl.callbacks.gradient_sum import GradientSum
from lightning_sparsefl.callbacks.group_penalty import GroupPenalty, scales_of
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.learned_importance import LearnedImportance
from lightning_sparsefl.callbacks.meta_step import MetaStep
from lightning_sparsefl.callbacks.moreau_envelope import MoreauEnvelope
from lightning_sparsefl.callbacks.ordered_dropout import OrderedDropout
from lightning_sparsefl.callbacks.personal_mixture import PersonalMixture
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.callbacks.sparse_inputs import SparseInputs
from lightning_sparsefl.callbacks.stacking.base import StackedCallback
from lightning_sparsefl.callbacks.stacking.extrusion import StackedExtrusion
from lightning_sparsefl.callbacks.stacking.gradients import (
    StackedMeter,
    StackedOffset,
    StackedPenalty,
    StackedProximalTerm,
    StackedScalePenalty,
    StackedSum,
    StackedUnitPenalty,
)
from lightning_sparsefl.callbacks.stacking.importance import StackedImportance, scores_of
from lightning_sparsefl.callbacks.stacking.inputs import StackedActivations, StackedSparseInputs
from lightning_sparsefl.callbacks.stacking.masks import StackedFeedback, StackedFreezing, StackedMask
from lightning_sparsefl.callbacks.stacking.outputs import StackedDropout, StackedExits, StackedLabels, StackedScaler
from lightning_sparsefl.callbacks.stacking.reparameterized import StackedReparameterized, StackedThresholds
from lightning_sparsefl.callbacks.stacking.rows import NOT_CALLED, StackedRows
from lightning_sparsefl.callbacks.stacking.second_point import StackedEnvelope, StackedMetaStep, StackedMixture
from lightning_sparsefl.callbacks.stacking.trees import alike
from lightning_sparsefl.callbacks.static_mask import StaticMask
from lightning_sparsefl.callbacks.step_meter import StepMeter
from lightning_sparsefl.callbacks.unit_scores import UnitScores
from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds
from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler


@dataclass(frozen=True)
class _Kind:
    """How callbacks of one kind are stacked."""

    key: Callable[[Any], Hashable]
    """What must agree for callbacks to act on a stack as one; None if a callback cannot be stacked."""
    make: Callable[[Sequence[Any], nn.Module, Sequence[int]], StackedCallback]
    """Makes the counterpart from the callbacks, the module, and the number of steps of each client."""
    accumulates: bool = True
    """Whether the counterpart may act where the gradients of several batches make one optimizer step."""


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _penalty(callbacks: Sequence[GroupPenalty], module: nn.Module, totals: Sequence[int]) -> StackedCallback:
    first, parameters = callbacks[0], dict(module.named_parameters())
    if first.groups == "layers":
        return StackedPenalty(callbacks, first.choose(module), totals)
    if first.groups == "scales":
        return StackedScalePenalty(callbacks, scales_of(module), totals)
    groups = [callback.find(module, parameters) for callback in callbacks]
    if not alike(groups):
        return StackedRows(callbacks, module, totals)
    return StackedUnitPenalty(callbacks, groups[0], module, totals)


def _given_key(callback: StaticMask | ErrorFeedback) -> Hashable:
    return (callback._given is None, *sorted(callback.masks))


def _if_given(
    make: Callable[[Sequence[Any]], StackedCallback],
) -> Callable[[Sequence[Any], nn.Module, Sequence[int]], StackedCallback]:
    """Return what makes the counterpart of callbacks whose masks are given; others make them when a fit starts."""

    def made(callbacks: Sequence[Any], module: nn.Module, totals: Sequence[int]) -> StackedCallback:
        given = callbacks[0]._given is not None
        return make(callbacks) if given else StackedRows(callbacks, module, totals)

    return made


def _freezing_key(callback: LayerFreezing) -> Hashable:
    return tuple((name, bool(mask.any())) for name, mask in sorted(callback.trainable.items()))


def _importance_key(callback: LearnedImportance) -> Hashable | None:
    if not callback.stackable:
        return None
    groups = tuple((group.name, group.size) for group in callback.given_groups or ())
    options = (callback.pattern, callback.lr, callback.strength, callback.reduction, callback.refresh)
    return (groups, options, bool(callback.steps.scores))


_KINDS: dict[type[Callback], _Kind] = {
    StaticMask: _Kind(_given_key, _if_given(lambda masks: StackedMask([mask.masks for mask in masks]))),
    ErrorFeedback: _Kind(_given_key, _if_given(StackedFeedback)),
    LayerFreezing: _Kind(_freezing_key, lambda callbacks, *_: StackedFreezing(callbacks)),
    ProximalTerm: _Kind(
        lambda callback: (callback.strength, None if callback.anchor is None else tuple(sorted(callback.anchor))),
        lambda callbacks, module, _: StackedProximalTerm(callbacks, module),
    ),
    GradientOffset: _Kind(
        lambda callback: tuple(sorted(callback.offset)), lambda callbacks, module, _: StackedOffset(callbacks, module)
    ),
    StepMeter: _Kind(
        lambda callback: (callback.mu, callback.mean_gradient), lambda callbacks, *_: StackedMeter(callbacks)
    ),
    GradientSum: _Kind(
        lambda callback: callback._squared,
        lambda callbacks, module, _: StackedSum(callbacks, _names(module)),
    ),
    GroupPenalty: _Kind(
        lambda callback: (callback.groups, callback.strength, callback.stairs, tuple(callback.layers or ())), _penalty
    ),
    BudgetAwareExtrusion: _Kind(
        lambda c: None if c.masks is None else (c.strength, c.share, c.psi, c.max_lr, tuple(c.masks)),
        lambda callbacks, _, totals: StackedExtrusion(callbacks, totals),
    ),
    OutputScaler: _Kind(
        lambda callback: (callback.layers, callback.rate),
        lambda callbacks, module, _: StackedScaler(callbacks, module),
    ),
    LabelMask: _Kind(lambda callback: callback.layers, lambda callbacks, module, _: StackedLabels(callbacks, module)),
    EarlyExits: _Kind(
        lambda callback: (callback.depth, callback.strength),
        lambda callbacks, module, _: StackedExits(callbacks, module),
    ),
    TaughtExits: _Kind(
        lambda callback: (callback.depth, callback.strength, callback.temperature),
        lambda callbacks, module, _: StackedExits(callbacks, module),
    ),
    OrderedDropout: _Kind(
        lambda callback: None if not callback.groups else (callback.rates, callback.distill, callback.head),
        lambda callbacks, module, _: StackedDropout(callbacks, module),
        accumulates=False,
    ),
    SparseInputs: _Kind(lambda _: True, lambda callbacks, module, _: StackedSparseInputs(callbacks, module)),
    ActivationPruning: _Kind(
        lambda callback: callback.density, lambda callbacks, module, _: StackedActivations(callbacks, module)
    ),
    PersonalMixture: _Kind(
        lambda callback: callback.adaptive,
        lambda callbacks, module, _: StackedMixture(callbacks, _names(module)),
        accumulates=False,
    ),
    MoreauEnvelope: _Kind(
        lambda callback: (callback.strength, callback.lr, callback.steps, callback.decay),
        lambda callbacks, module, _: StackedEnvelope(callbacks, _names(module)),
        accumulates=False,
    ),
    MetaStep: _Kind(
        lambda callback: (callback.lr, callback.order, callback.delta),
        lambda callbacks, *_: StackedMetaStep(callbacks),
        accumulates=False,
    ),
    LearnedImportance: _Kind(
        _importance_key, lambda callbacks, module, _: StackedImportance(callbacks, module), accumulates=False
    ),
    UnitScores: _Kind(
        lambda callback: (callback.steps.lr, callback.steps.strength, callback.steps.reduction),
        lambda callbacks, module, totals: scores_of(callbacks, module) or StackedRows(callbacks, module, totals),
        accumulates=False,
    ),
    UnitThresholds: _Kind(
        lambda callback: tuple(callback.theta or callback.thresholds) or None,
        lambda callbacks, module, _: StackedThresholds(callbacks, callbacks[0].chosen(module)),
    ),
}


def stacking_key(callback: Callback) -> Hashable | None:
    """Return what must agree for callbacks of a kind to act on a stack as one; None if they cannot.

    Args:
        callback: Callback of one client's fit.

    Example:
        >>> stacking_key(ProximalTerm(0.1)) == stacking_key(ProximalTerm(0.1))
        True
        >>> stacking_key(Callback()) is None
        True
    """
    kind, known = type(callback), _KINDS.get(type(callback))
    if known is not None:
        key = known.key(callback)
        return None if key is None else (kind, key)
    if isinstance(callback, Reparameterized):
        return (kind, tuple(callback.theta)) if callback.theta else None
    called = not any(is_overridden(hook, callback, Callback) for hook in NOT_CALLED)
    return (kind,) if called and getattr(callback, "stackable", False) else None


def accumulates(callback: Callback) -> bool:
    """Return whether a callback can act on a stack where the gradients of several batches make one optimizer step.

    Args:
        callback: Callback with a :func:`stacking_key`.

    Example:
        >>> accumulates(ProximalTerm(0.1)), accumulates(MetaStep(0.1))
        (True, False)
    """
    known = _KINDS.get(type(callback))
    return known is None or known.accumulates


def stacked(callbacks: Sequence[Any], module: nn.Module, totals: Sequence[int]) -> StackedCallback:
    """Return the counterpart of callbacks of several clients with equal :func:`stacking_key`.

    Args:
        callbacks: One callback for each client.
        module: Module of the user, from which patterns choose layers.
        totals: Number of optimizer steps of each client's fit.

    Example:
        >>> import torch
        >>> masks = [{"weight": torch.eye(2, dtype=torch.bool)}, {"weight": torch.ones(2, 2, dtype=torch.bool)}]
        >>> mask = stacked([StaticMask(masks=each) for each in masks], nn.Linear(2, 2), [1, 1])
        >>> leaves = {"weight": torch.ones(2, 2, 2)}
        >>> mask.start(leaves)
        >>> leaves["weight"].sum(dim=(1, 2))
        tensor([2., 4.])
    """
    first = callbacks[0]
    if type(first) in _KINDS:
        return _KINDS[type(first)].make(callbacks, module, totals)
    if isinstance(first, Reparameterized):
        return StackedReparameterized(callbacks, tuple(first.theta))
    return StackedRows(callbacks, module, totals)
