"""Masks, error feedback and frozen weights of several clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback


class StackedMask(StackedCallback):
    """Counterpart of :class:`StaticMask` with given masks."""

    per_client = ("dropped",)

    def __init__(self, masks: Sequence[Mapping[str, Tensor]]) -> None:
        self.dropped = {name: ~torch.stack([mask[name] for mask in masks]) for name in masks[0]}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.dropped

    @torch.no_grad()
    def start(self, leaves: Leaves) -> None:
        """Zero the weights that are not held."""
        self.after_step(leaves)

    def before_step(self, leaves: Leaves, step: int) -> None:
        """Zero the gradients of the weights that are not held."""
        for name, dropped in self.dropped.items():
            grad = leaves[name].grad
            if grad is not None:
                grad.masked_fill_(dropped, 0)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Zero the weights that are not held."""
        for name, dropped in self.dropped.items():
            leaves[name].masked_fill_(dropped, 0)


class StackedFeedback(StackedCallback):
    """Counterpart of :class:`ErrorFeedback` with given masks."""

    per_client = ("dropped", "pruned")

    def __init__(self, callbacks: Sequence[ErrorFeedback]) -> None:
        masks = [callback.masks for callback in callbacks]
        self.dropped = {name: ~torch.stack([mask[name] for mask in masks]) for name in masks[0]}
        self.pruned: dict[str, Tensor] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.dropped

    @torch.no_grad()
    def start(self, leaves: Leaves) -> None:
        """Prune the weights; nothing is kept of their pruned part, as at the start of a fit."""
        for name, dropped in self.dropped.items():
            leaves[name].masked_fill_(dropped, 0)
            self.pruned[name] = torch.zeros_like(leaves[name], requires_grad=False)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, step: int) -> None:
        """Make the weights dense."""
        for name, pruned in self.pruned.items():
            leaves[name].add_(pruned)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Prune the weights, and keep the pruned part."""
        for name, dropped in self.dropped.items():
            self.pruned[name].copy_(leaves[name]).masked_fill_(~dropped, 0)
            leaves[name].masked_fill_(dropped, 0)

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback the pruned part of its dense weights."""
        for place, callback in enumerate(callbacks):
            callback._pruned = {name: pruned[place].clone() for name, pruned in self.pruned.items()}


class StackedFreezing(StackedCallback):
    """Counterpart of :class:`LayerFreezing`; tensors that are frozen throughout have no gradients at all."""

    per_client = ("frozen", "values")

    def __init__(self, callbacks: Sequence[LayerFreezing]) -> None:
        trainable = [callback.trainable for callback in callbacks]
        partly = [n for n in trainable[0] if any(bool(t[n].any()) and not bool(t[n].all()) for t in trainable)]
        self.frozen = {name: ~torch.stack([tree[name] for tree in trainable]) for name in partly}
        self.values: dict[str, Tensor] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return name in self.frozen

    def start(self, leaves: Leaves) -> None:
        """Store the values of frozen entries."""
        self.values = {name: leaves[name].detach().clone() for name in self.frozen if leaves[name].requires_grad}

    def before_step(self, leaves: Leaves, step: int) -> None:
        """Drop the gradients of frozen entries."""
        for name in self.values:
            grad = leaves[name].grad
            if grad is not None:
                grad.masked_fill_(self.frozen[name], 0)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Restore frozen entries."""
        for name, values in self.values.items():
            leaves[name].copy_(torch.where(self.frozen[name], values, leaves[name]))
