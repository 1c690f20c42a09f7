"""What is added to the gradients of several clients, or taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.gradient_offset import GradientOffset
from lightning_sparsefl.callbacks.gradient_sum import GradientSum
from lightning_sparsefl.callbacks.group_penalty import GroupPenalty
from lightning_sparsefl.callbacks.mask_owner import of_parameters
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, first_stepped_of
from lightning_sparsefl.callbacks.step_meter import StepMeter
from lightning_sparsefl.sparse.schedule import staircase


class StackedProximalTerm(StackedCallback):
    """Counterpart of :class:`ProximalTerm`."""

    per_client = ("anchors",)

    def __init__(self, callbacks: Sequence[ProximalTerm], module: nn.Module) -> None:
        self.strength = callbacks[0].strength
        self._given = None
        if callbacks[0].anchor is not None:
            self._given = [of_parameters(c.anchor or {}, module, "ProximalTerm", "anchor") for c in callbacks]
        self.anchors: dict[str, Tensor] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return False

    def start(self, leaves: Leaves) -> None:
        """Copy the anchors."""
        for name, leaf in leaves.items():
            if self._given is None:
                self.anchors[name] = leaf.detach().clone()
            elif name in self._given[0]:
                anchors = torch.stack([anchor[name] for anchor in self._given])
                self.anchors[name] = anchors.to(leaf.device, leaf.dtype)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the gradient of the term."""
        for name, anchors in self.anchors.items():
            leaf = leaves[name]
            if leaf.grad is not None:
                leaf.grad.add_(leaf - anchors, alpha=self.strength)


class StackedOffset(StackedCallback):
    """Counterpart of :class:`GradientOffset`."""

    per_client = ("offsets",)

    def __init__(self, callbacks: Sequence[GradientOffset], module: nn.Module) -> None:
        each = [of_parameters(callback.offset, module, "GradientOffset", "offset") for callback in callbacks]
        self.offsets = {name: torch.stack([offset[name] for offset in each]) for name in each[0]}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return False

    def start(self, leaves: Leaves) -> None:
        """Move the offsets to the weights' device and type."""
        self.offsets = {name: offset.to(leaves[name]) for name, offset in self.offsets.items() if name in leaves}

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the offsets."""
        for name, offsets in self.offsets.items():
            grad = leaves[name].grad
            if grad is not None:
                grad.add_(offsets)


class StackedMeter(StackedCallback):
    """Counterpart of :class:`StepMeter`: one meter for each client, all of which read the optimizer of the stack."""

    def __init__(self, callbacks: Sequence[StepMeter]) -> None:
        self.meters = list(callbacks)
        self.optimizer: Optimizer | None = None
        self._names: dict[int, str] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return False

    def rows(self, low: int, high: int) -> StackedCallback:
        """Return the part for some clients; see :class:`StackedCallback`."""
        part = cast(StackedMeter, super().rows(low, high))
        part.meters = self.meters[low:high]
        return part

    def start(self, leaves: Leaves) -> None:
        """Store the names of the leaves."""
        self._names = {id(leaf): name for name, leaf in leaves.items()}

    def prepare(self, optimizer: Optimizer, clips: bool) -> None:
        """Keep the optimizer, whose options are read before each step."""
        self.optimizer = optimizer
        self.meters[0].report(optimizer, clips=clips)

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Count the step of each client."""
        assert self.optimizer is not None
        group = first_stepped_of(leaves, self.optimizer, self._names)
        if group is not None:
            for meter in self.meters:
                meter.count(group)


class StackedSum(StackedCallback):
    """Counterpart of :class:`GradientSum`."""

    per_client = ("sums", "squares")

    def __init__(self, callbacks: Sequence[GradientSum], names: Sequence[str]) -> None:
        self.names, self._squared = names, callbacks[0]._squared
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def writes(self, name: str) -> bool:
        """Return whether a frozen weight may be written; see :class:`StackedCallback`."""
        return False

    def start(self, leaves: Leaves) -> None:
        """Begin new sums."""
        for tree in (self.sums, self.squares) if self._squared else (self.sums,):
            tree.update({name: torch.zeros_like(leaves[name], requires_grad=False) for name in self.names})

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the gradients."""
        for name, total in self.sums.items():
            grad = leaves[name].grad
            if grad is not None:
                total.add_(grad)
                if self._squared:
                    self.squares[name].addcmul_(grad, grad)

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback its sums."""
        for place, callback in enumerate(callbacks):
            callback.sums = {name: total[place].clone() for name, total in self.sums.items()}
            callback.squares = {name: total[place].clone() for name, total in self.squares.items()}


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
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the gradient of the term."""
        strengths = [
            self.strength if self.stairs is None else staircase(self.strength, self.stairs, step, total)
            for step, total in zip(steps, self.totals, strict=True)
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
