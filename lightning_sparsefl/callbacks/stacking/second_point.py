"""Passes of several clients at second points: mixtures, Moreau envelopes and steps of adaptation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.meta_step import MetaStep
from lightning_sparsefl.callbacks.moreau_envelope import MoreauEnvelope
from lightning_sparsefl.callbacks.personal_mixture import PersonalMixture
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass, column, first_stepped_of
from lightning_sparsefl.sparse.masks import descend
from lightning_sparsefl.types import Weights


class StackedSecondPoint(StackedCallback):
    """Base class of the counterparts of callbacks that make passes at other points than the weights."""

    def __init__(self) -> None:
        self._own: dict[str, Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._names: dict[int, str] = {}

    def start(self, leaves: Leaves) -> None:
        """Store the names of the leaves."""
        self._names = {id(leaf): name for name, leaf in leaves.items()}

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Keep the optimizer, whose learning rates are read before each step."""
        self._optimizer = optimizer

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each weight."""
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        return {self._names[id(leaf)]: float(group["lr"]) for group in groups for leaf in group["params"]}

    @torch.no_grad()
    def go(self, leaves: Leaves, weights: Weights) -> None:
        """Put other weights into the leaves for the next training step.

        Args:
            leaves: Weights of the clients.
            weights: Weights to put there.
        """
        self._own = {name: leaves[name].detach().clone() for name in weights}
        for name, values in weights.items():
            leaves[name].copy_(values)

    @torch.no_grad()
    def back(self, leaves: Leaves) -> None:
        """Put the clients' own weights back, if others are there."""
        own, self._own = self._own, {}
        for name, values in own.items():
            leaves[name].copy_(values)


def trained(leaves: Leaves) -> dict[str, Tensor]:
    """Return the values of the leaves that are trained."""
    return {name: leaf.detach() for name, leaf in leaves.items() if leaf.requires_grad}


class StackedMixture(StackedSecondPoint):
    """Counterpart of :class:`PersonalMixture`: a second tree and a share for each client."""

    per_client = ("personal", "shares")

    def __init__(self, callbacks: Sequence[PersonalMixture], names: Sequence[str]) -> None:
        super().__init__()
        self._given, self._parameters, self.adaptive = callbacks, names, callbacks[0].adaptive
        self.shares = {"alpha": torch.tensor([callback.alpha for callback in callbacks], dtype=torch.float64)}
        self.personal: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}

    def start(self, leaves: Leaves) -> None:
        """Copy the second weights."""
        super().start(leaves)
        for name in self._parameters:
            self.personal[name] = leaves[name].detach().clone()
            for row, callback in zip(self.personal[name], self._given, strict=True):
                if name in callback.personal:
                    row.copy_(callback.personal[name])

    def before_pass(self, batch: StackedPass) -> None:
        """Take the gradients at the mixtures."""
        alpha = self.shares["alpha"]
        mixture = {}
        for name, weight in trained(batch.leaves).items():
            mixture[name] = column(alpha, weight) * self.personal[name] + column(1 - alpha, weight) * weight
        self._slopes = batch.gradient(mixture)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Step the second weights, and the shares in the first step of a fit."""
        alpha, rates = self.shares["alpha"], self.rates()
        total = torch.zeros_like(alpha)
        for name, slope in self._slopes.items():
            if self.adaptive and steps[0] == 0:
                product = (self.personal[name] - leaves[name]) * slope
                total += product.reshape(len(total), -1).sum(1).to(total)
            self.personal[name].sub_(column(rates.get(name, 0.0) * alpha, slope) * slope)
        if self.adaptive and steps[0] == 0:
            assert self._optimizer is not None
            group = first_stepped_of(leaves, self._optimizer, self._names)
            if group is not None:
                alpha.sub_(float(group["lr"]) * total).clamp_(0, 1)

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback its second weights and its share."""
        for place, callback in enumerate(callbacks):
            callback.personal = {name: tensor[place].clone() for name, tensor in self.personal.items()}
            callback.alpha = float(self.shares["alpha"][place])


class StackedEnvelope(StackedSecondPoint):
    """Counterpart of :class:`MoreauEnvelope`."""

    per_client = ("personal",)

    def __init__(self, callbacks: Sequence[MoreauEnvelope], names: Sequence[str]) -> None:
        super().__init__()
        self._of, self._parameters = callbacks[0], names
        self.personal: dict[str, Tensor] = {}

    def start(self, leaves: Leaves) -> None:
        """Copy the personal weights."""
        super().start(leaves)
        self.personal = {name: leaves[name].detach().clone() for name in self._parameters}

    def before_pass(self, batch: StackedPass) -> None:
        """Make all steps of the personal weights but the last, and put them into the leaves for that."""
        weights = trained(batch.leaves)
        for _ in range(self._of.steps - 1):
            self._descend(batch.gradient({name: self.personal[name] for name in weights}), weights)
        self.go(batch.leaves, {name: self.personal[name] for name in weights})

    def _descend(self, slopes: Weights, weights: Weights) -> None:
        """Make a step of the personal weights."""
        of = self._of
        for name, slope in slopes.items():
            theta = self.personal[name]
            theta.sub_(slope + of.strength * (theta - weights[name]) + of.decay * theta, alpha=of.lr)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Make the last step of the personal weights, and give the leaves their weights and gradients back."""
        self._of._check(self.rates().values())
        self.back(leaves)
        slopes = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        self._descend(slopes, {name: leaves[name].detach() for name in slopes})
        for name in slopes:
            leaves[name].grad = self._of.strength * (leaves[name].detach() - self.personal[name])

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback its personal weights."""
        for place, callback in enumerate(callbacks):
            callback.personal = {name: tensor[place].clone() for name, tensor in self.personal.items()}


class StackedMetaStep(StackedSecondPoint):
    """Counterpart of :class:`MetaStep`: a batch's place in its tuple follows from the number of batches before it."""

    per_client = ("adapted", "slopes", "below", "sloped")

    def __init__(self, callbacks: Sequence[MetaStep]) -> None:
        super().__init__()
        self._of = callbacks[0]
        self._length = 2 if self._of.order == "first" else 3
        self.adapted: dict[str, Tensor] = {}
        self.slopes: dict[str, Tensor] = {}
        self.below: dict[str, Tensor] = {}
        self.sloped: dict[str, Tensor] = {}
        """Whether the second batch of a client's tuple has given a weight a gradient."""

    def start(self, leaves: Leaves) -> None:
        """Allocate an open tuple for each client."""
        super().start(leaves)
        trees = (self.adapted, self.slopes, self.below) if self._length == 3 else (self.adapted,)
        for tree in trees:
            tree.update({name: torch.zeros_like(weight) for name, weight in trained(leaves).items()})
        self.sloped = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in self.slopes.items()}

    def phase(self, steps: int) -> int:
        """Return the place of the next batch in its tuple."""
        return steps % self._length

    def before_pass(self, batch: StackedPass) -> None:
        """Put the weights into the leaves at which this batch of the tuple is passed."""
        place = self.phase(batch.steps[0])
        if place == 1:
            self.go(batch.leaves, self.adapted)
        elif place == 2:
            weights = trained(batch.leaves)
            for name, slope in batch.gradient(descend(weights, self.slopes, self._of.delta)).items():
                self.below[name].copy_(slope)
            self.go(batch.leaves, descend(weights, self.slopes, -self._of.delta))

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Put the clients' weights back, and replace or remove the gradients."""
        self.back(leaves)
        place = self.phase(steps[0])
        for name, adapted in self.adapted.items():
            leaf, slope = leaves[name], leaves[name].grad
            if place == 0:
                adapted.copy_(leaf if slope is None else leaf - self._of.lr * slope)
            elif place == 1 and self._length == 3:
                self.sloped[name].fill_(slope is not None)
                self.slopes[name].copy_(torch.zeros_like(leaf) if slope is None else slope)
            elif place == 2:
                leaf.grad = self._corrected(name, slope)
            if place + 1 < self._length:
                leaf.grad = None

    def _corrected(self, name: str, above: Tensor | None) -> Tensor | None:
        """Return the gradient of the second batch, less the product with the Hessian; None if it has given none."""
        if not bool(self.sloped[name][0]):  # clients that step together had the same batches of a tuple
            return None
        slope = self.slopes[name].clone()
        return slope if above is None else slope - self._of.lr * (above - self.below[name]) / (2 * self._of.delta)
