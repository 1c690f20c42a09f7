"""Callbacks of several clients at once, for the stacked engine (`federation.local_engine: stacked`).

A stack trains clients whose weights are leaves with the clients in dimension 0. What a callback does to one client's
weights and gradients, its counterpart here does to those of all clients of a stack. A callback without a counterpart
trains its clients one after another. Each counterpart is compared with its callback by
`tests/contract/test_stacked_parity.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.gradient_offset import GradientOffset
from lightning_sparsefl.callbacks.group_penalty import GroupPenalty
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.static_mask import StaticMask
from lightning_sparsefl.sparse.schedule import staircase
from lightning_sparsefl.types import Weights

Leaves = Mapping[str, Tensor]
"""Weights of several clients by name, with the clients in dimension 0."""


class StackedCallback:
    """Base class: what callbacks of one kind do to several clients.

    Its dictionaries of tensors, named in `per_client`, have the clients in dimension 0.
    """

    per_client: ClassVar[tuple[str, ...]] = ()

    def rows(self, low: int, high: int) -> StackedCallback:
        """Return the part for the clients from `low` to before `high`, whose tensors are views.

        Args:
            low: First place in the stack.
            high: Place after the last one.
        """
        part = copy.copy(self)
        for name in self.per_client:
            setattr(part, name, {key: tensor[low:high] for key, tensor in getattr(self, name).items()})
        return part

    def start(self, leaves: Leaves) -> None:
        """Act when the weights are loaded."""

    def before_step(self, leaves: Leaves, step: int) -> None:
        """Act on the gradients, before they are clipped.

        Args:
            leaves: Weights of the clients, with gradients.
            step: Number of optimizer steps that these clients have taken.
        """

    def after_step(self, leaves: Leaves) -> None:
        """Act on the weights, after the optimizer's step."""

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback what its algorithm reads after the fit.

        Args:
            callbacks: The callbacks that this one stands for.
        """


class StackedMask(StackedCallback):
    """Counterpart of :class:`StaticMask` with given masks."""

    per_client = ("dropped",)

    def __init__(self, masks: Sequence[Mapping[str, Tensor]]) -> None:
        self.dropped = {name: ~torch.stack([mask[name] for mask in masks]) for name in masks[0]}

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


class StackedProximalTerm(StackedCallback):
    """Counterpart of :class:`ProximalTerm`."""

    per_client = ("anchors",)

    def __init__(self, callbacks: Sequence[ProximalTerm]) -> None:
        self.strength = callbacks[0].strength
        given = [callback.anchor for callback in callbacks]
        self._given = None if None in given or not given[0] else cast(list[Weights], given)
        self.anchors: dict[str, Tensor] = {}

    def start(self, leaves: Leaves) -> None:
        """Copy the anchors."""
        for name, leaf in leaves.items():
            if self._given is None:
                self.anchors[name] = leaf.detach().clone()
            elif name in self._given[0]:
                anchors = torch.stack([anchor[name] for anchor in self._given])
                self.anchors[name] = anchors.to(leaf.device, leaf.dtype)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, step: int) -> None:
        """Add the gradient of the term."""
        for name, anchors in self.anchors.items():
            leaf = leaves[name]
            if leaf.grad is not None:
                leaf.grad.add_(leaf - anchors, alpha=self.strength)


class StackedOffset(StackedCallback):
    """Counterpart of :class:`GradientOffset`."""

    per_client = ("offsets",)

    def __init__(self, callbacks: Sequence[GradientOffset]) -> None:
        names = callbacks[0].offset
        self.offsets = {name: torch.stack([callback.offset[name] for callback in callbacks]) for name in names}

    def start(self, leaves: Leaves) -> None:
        """Move the offsets to the weights' device and type."""
        self.offsets = {name: offset.to(leaves[name]) for name, offset in self.offsets.items() if name in leaves}

    @torch.no_grad()
    def before_step(self, leaves: Leaves, step: int) -> None:
        """Add the offsets."""
        for name, offsets in self.offsets.items():
            grad = leaves[name].grad
            if grad is not None:
                grad.add_(offsets)


class StackedPenalty(StackedCallback):
    """Counterpart of :class:`GroupPenalty`: one norm for each client's layer, and one staircase for each client."""

    def __init__(self, callbacks: Sequence[GroupPenalty], layers: Sequence[str], totals: Sequence[int]) -> None:
        self.strength, self.stairs = callbacks[0].strength, callbacks[0].stairs
        self.layers, self.totals = layers, list(totals)

    def rows(self, low: int, high: int) -> StackedCallback:
        """Return the part for some clients; see :class:`StackedCallback`."""
        part = cast(StackedPenalty, super().rows(low, high))
        part.totals = self.totals[low:high]
        return part

    @torch.no_grad()
    def before_step(self, leaves: Leaves, step: int) -> None:
        """Add the gradient of the term."""
        strengths = [
            self.strength if self.stairs is None else staircase(self.strength, self.stairs, step, total)
            for total in self.totals
        ]
        if not any(strengths):
            return
        for name in self.layers:
            weight = leaves[name]
            if weight.grad is None:
                continue
            norms = weight.flatten(1).norm(dim=1)
            factors = torch.where(norms > 0, norms.new_tensor(strengths) / norms, 0.0)
            weight.grad.addcmul_(weight, factors.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight))


_KINDS: dict[type[Callback], Callable[[Any], Hashable]] = {
    StaticMask: lambda callback: tuple(sorted(callback.masks)),
    ErrorFeedback: lambda callback: tuple(sorted(callback.masks)),
    LayerFreezing: lambda callback: tuple(
        (name, bool(mask.any())) for name, mask in sorted(callback.trainable.items())
    ),
    ProximalTerm: lambda callback: (callback.strength, None if not callback.anchor else tuple(sorted(callback.anchor))),
    GradientOffset: lambda callback: tuple(sorted(callback.offset)),
    GroupPenalty: lambda callback: (callback.strength, callback.stairs, tuple(callback.layers or ())),
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
    kind = _KINDS.get(type(callback))
    if kind is None or (isinstance(callback, (StaticMask, ErrorFeedback)) and callback._given is None):
        return None
    return (type(callback), kind(callback))


def stacked(callbacks: Sequence[Any], module: nn.Module, totals: Sequence[int]) -> StackedCallback:
    """Return the counterpart of callbacks of several clients with equal :func:`stacking_key`.

    Args:
        callbacks: One callback for each client.
        module: Module of the user, from which patterns choose layers.
        totals: Number of optimizer steps of each client's fit.

    Example:
        >>> masks = [{"weight": torch.eye(2, dtype=torch.bool)}, {"weight": torch.ones(2, 2, dtype=torch.bool)}]
        >>> mask = stacked([StaticMask(masks=each) for each in masks], nn.Linear(2, 2), [1, 1])
        >>> leaves = {"weight": torch.ones(2, 2, 2)}
        >>> mask.start(leaves)
        >>> leaves["weight"].sum(dim=(1, 2))
        tensor([2., 4.])
    """
    kind = type(callbacks[0])
    if kind is StaticMask:
        return StackedMask([callback.masks for callback in callbacks])
    if kind is ErrorFeedback:
        return StackedFeedback(callbacks)
    if kind is LayerFreezing:
        return StackedFreezing(callbacks)
    if kind is ProximalTerm:
        return StackedProximalTerm(callbacks)
    if kind is GradientOffset:
        return StackedOffset(callbacks)
    return StackedPenalty(callbacks, choose(module, callbacks[0].layers, "GroupPenalty"), totals)
