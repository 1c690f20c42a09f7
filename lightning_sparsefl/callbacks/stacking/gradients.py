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
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, column, first_stepped_of
from lightning_sparsefl.callbacks.stacking.trees import in_blocks, stack_trees
from lightning_sparsefl.callbacks.step_meter import StepMeter
from lightning_sparsefl.sparse.schedule import staircase
from lightning_sparsefl.sparse.unit_lasso import lasso_slots, unit_lasso_gradients
from lightning_sparsefl.sparse.units import UnitGroup


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
        self.offsets = stack_trees(each)

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

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
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
    """Counterpart of :class:`GroupPenalty`: one norm for each client's layer, and one staircase for each client.

    Args:
        callbacks: One callback for each client.
        names: Names of the penalized weights.
        totals: Number of optimizer steps of each client's fit.
    """

    in_order = ("totals",)

    def __init__(self, callbacks: Sequence[GroupPenalty], names: Sequence[str], totals: Sequence[int]) -> None:
        self.strength, self.stairs = callbacks[0].strength, callbacks[0].stairs
        self.names, self.totals = names, list(totals)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the gradient of the term."""
        strengths = [
            self.strength if self.stairs is None else staircase(self.strength, self.stairs, step, total)
            for step, total in zip(steps, self.totals, strict=True)
        ]
        if any(strengths):
            weights = {name: leaves[name] for name in self.names if leaves[name].grad is not None}
            self.add(weights, torch.tensor(strengths, dtype=torch.float64))

    def add(self, leaves: Leaves, strengths: Tensor) -> None:
        """Add the gradient of the term.

        Args:
            leaves: Penalized weights that have gradients.
            strengths: Strength of each client.
        """
        for weight in leaves.values():
            norms = weight.flatten(1).norm(dim=1)
            factors = torch.where(norms > 0, strengths.to(norms) / norms, 0.0)
            _gradient(weight).addcmul_(weight, column(factors, weight))


class StackedScalePenalty(StackedPenalty):
    """Counterpart of :class:`GroupPenalty` with the groups "scales"."""

    def add(self, leaves: Leaves, strengths: Tensor) -> None:
        """Add the gradient of the term; see :class:`StackedPenalty`."""
        for weight in leaves.values():
            _gradient(weight).addcmul_(weight.sign(), column(strengths, weight))


class StackedUnitPenalty(StackedPenalty):
    """Counterpart of :class:`GroupPenalty` with the groups "units".

    Args:
        callbacks: One callback for each client.
        groups: Groups of units of the module, which the clients have in common.
        module: Module of the clients.
        totals: Number of optimizer steps of each client's fit.
    """

    def __init__(
        self, callbacks: Sequence[GroupPenalty], groups: Sequence[UnitGroup], module: nn.Module, totals: Sequence[int]
    ) -> None:
        names = dict.fromkeys(slot.name for slot in lasso_slots(groups, dict(module.named_parameters())))
        super().__init__(callbacks, list(names), totals)
        self.groups = groups

    def add(self, leaves: Leaves, strengths: Tensor) -> None:
        """Add the gradient of the term; see :class:`StackedPenalty`."""
        weights = {name: weight.detach() for name, weight in leaves.items()}
        slopes = {name: _gradient(weight) for name, weight in leaves.items()}
        for weight, slope, own in in_blocks(weights, slopes, {"": strengths}):
            for name, gradient in unit_lasso_gradients(self.groups, weight, leading=1).items():
                slope[name].addcmul_(gradient, column(own[""], gradient))


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, which has one."""
    assert leaf.grad is not None
    return leaf.grad
