"""Masks, error feedback and frozen weights of several clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass
from lightning_sparsefl.callbacks.stacking.lasting_zeros import LastingZeros
from lightning_sparsefl.callbacks.stacking.trees import stack_trees
from lightning_sparsefl.sparse.apply import InPlaceMask


class StackedMask(StackedCallback):
    """Counterpart of :class:`StaticMask` with given masks."""

    per_client = ("stencils",)

    def __init__(self, masks: Sequence[Mapping[str, Tensor]]) -> None:
        self.masks = stack_trees(masks)
        self.stencils: dict[str, InPlaceMask] = {}

    @property
    def makes_masks(self) -> bool:
        """Whether it masks first; see :class:`StackedCallback`."""
        return True

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.masks

    def start(self, leaves: Leaves) -> None:
        """Zero the weights that are not held."""
        self.stencils = _stencils(self.masks, leaves)
        self.zeros = LastingZeros(self.stencils, leaves)
        self.zeros.restore()

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Find out whether weights that are not held stay 0 in a step."""
        self.zeros.prepare(self, optimizer, chain)

    def after_hooks(self) -> None:
        """Zero the weights that are not held, which hooks may have written."""
        self.zeros.restore()

    def before_batch(self, batch: StackedPass) -> None:
        """Store the state of the weights."""
        self.zeros.before_batch(batch.leaves)

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Zero the gradients of the weights that are not held, and these weights if they have been written."""
        self.zeros.before_step(leaves, self.stencils)
        for name, stencil in self.stencils.items():
            grad = leaves[name].grad
            if grad is not None:
                stencil.zero_(grad)

    def after_step(self, leaves: Leaves) -> None:
        """Zero the weights that are not held, unless they are 0 by themselves."""
        self.zeros.after_step(leaves, self.stencils)

    def without_step(self, leaves: Leaves) -> None:
        """Zero the weights that are not held, if they may have been written."""
        self.zeros.without_step(leaves, self.stencils)

    def end_epoch(self) -> None:
        """Zero the weights that are not held, however they have been written."""
        self.zeros.restore()


class StackedFeedback(StackedCallback):
    """Counterpart of :class:`ErrorFeedback` with given masks."""

    per_client = ("stencils", "pruned")

    def __init__(self, callbacks: Sequence[ErrorFeedback]) -> None:
        self.masks = stack_trees([callback.masks for callback in callbacks])
        self.stencils: dict[str, InPlaceMask] = {}
        self.pruned: dict[str, Tensor] = {}

    @property
    def makes_masks(self) -> bool:
        """Whether it masks first; see :class:`StackedCallback`."""
        return True

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.masks

    @torch.no_grad()
    def start(self, leaves: Leaves) -> None:
        """Prune the weights; nothing is kept of their pruned part, as at the start of a fit."""
        self.stencils = _stencils(self.masks, leaves)
        self.zeros = LastingZeros(self.stencils, leaves)
        self.pruned = {name: torch.zeros_like(leaves[name], requires_grad=False) for name in self.stencils}
        self.zeros.restore()

    def after_hooks(self) -> None:
        """Zero the weights that are not held, which hooks may have written; what was pruned of them stays."""
        self.zeros.restore()

    def before_batch(self, batch: StackedPass) -> None:
        """Store the state of the weights."""
        self.zeros.before_batch(batch.leaves)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Zero the weights that are not held if they have been written, and make the weights dense."""
        self.zeros.before_step(leaves, self.stencils)
        for name, pruned in self.pruned.items():
            leaves[name].add_(pruned)

    def without_step(self, leaves: Leaves) -> None:
        """Zero the weights that are not held, which the batch may have written; what was pruned of them stays."""
        self.zeros.without_step(leaves, self.stencils)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Prune the weights, and keep the pruned part."""
        for name, stencil in self.stencils.items():
            stencil.split_(leaves[name], self.pruned[name])

    def end_epoch(self) -> None:
        """Zero the weights that are not held, however they have been written."""
        self.zeros.restore()

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback the pruned part of its dense weights."""
        for place, callback in enumerate(callbacks):
            callback._pruned = {name: pruned[place].clone() for name, pruned in self.pruned.items()}


class StackedFreezing(StackedCallback):
    """Counterpart of :class:`LayerFreezing`; tensors that are frozen throughout have no gradients at all."""

    per_client = ("stencils", "values")

    def __init__(self, callbacks: Sequence[LayerFreezing]) -> None:
        trainable = [callback.trainable for callback in callbacks]
        partly = [n for n in trainable[0] if any(bool(t[n].any()) and not bool(t[n].all()) for t in trainable)]
        self.masks = stack_trees([{name: tree[name] for name in partly} for tree in trainable])
        self.stencils: dict[str, InPlaceMask] = {}
        self.values: dict[str, Tensor] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.masks

    def start(self, leaves: Leaves) -> None:
        """Store the values of frozen entries."""
        self.stencils = _stencils({n: mask for n, mask in self.masks.items() if leaves[n].requires_grad}, leaves)
        for name, stencil in self.stencils.items():
            self.values[name] = torch.empty_like(leaves[name], requires_grad=False)
            stencil.split_(leaves[name].detach().clone(), self.values[name])

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Drop the gradients of frozen entries."""
        for name, stencil in self.stencils.items():
            grad = leaves[name].grad
            if grad is not None:
                stencil.zero_(grad)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Restore frozen entries."""
        for name, stencil in self.stencils.items():
            stencil.join_(leaves[name], self.values[name])


def _stencils(masks: Mapping[str, Tensor], leaves: Leaves) -> dict[str, InPlaceMask]:
    """Return masks, made ready for weights of their types."""
    return {name: InPlaceMask(mask, leaves[name].dtype) for name, mask in masks.items()}
