"""Scores of units of several clients, and the units that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.learned_importance import LearnedImportance, check_scores
from lightning_sparsefl.callbacks.masking import forget
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass
from lightning_sparsefl.callbacks.stacking.lasting_zeros import LastingZeros
from lightning_sparsefl.callbacks.stacking.trees import (
    alike,
    block_rows,
    groups_on,
    in_blocks,
    join_blocks,
    row_of,
    stack_trees,
)
from lightning_sparsefl.callbacks.unit_scores import ScoreSteps, UnitScores
from lightning_sparsefl.sparse.apply import InPlaceMask
from lightning_sparsefl.sparse.importance import add_row_gradients, gate_gradients, relative
from lightning_sparsefl.sparse.units import UnitGroup, broadcast_unit_masks, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.sparse.width import blind_ranking
from lightning_sparsefl.types import Weights


class StackedScores(StackedCallback):
    """Counterpart of :class:`UnitScores`.

    Args:
        steps: Scores of each client, whose options agree.
        groups: Groups of units of the module, which the clients have in common.
        absent: Part of the norms that is not in the module, for each client.
        at: Numbers of the units that the module has, for each client.
        names: Names of the module's weights.
    """

    per_client: ClassVar[tuple[str, ...]] = ("scores", "absent", "at")

    def __init__(
        self,
        steps: Sequence[ScoreSteps],
        groups: Sequence[UnitGroup],
        absent: Sequence[Weights],
        at: Sequence[Weights],
        names: Sequence[str],
    ) -> None:
        self.steps, self.groups, self.names = steps[0], groups, names
        self.scores = stack_trees([each.scores for each in steps])
        self.absent, self.at = stack_trees(absent), stack_trees(at)
        self._task: Weights = {}

    def start(self, leaves: Leaves) -> None:
        """Move what is kept of the clients to the device of their weights."""
        device = next(iter(leaves.values())).device
        self.groups = groups_on(device, self.groups)
        for name in self.per_client:
            setattr(self, name, {key: tensor.to(device) for key, tensor in getattr(self, name).items()})

    def after_backward(self, batch: StackedPass) -> None:
        """Take the scores' gradient."""
        slopes = {name: slope for name in self.names if (slope := batch.leaves[name].grad) is not None}
        weights = {name: batch.leaves[name].detach() for name in slopes}
        self._task = {}
        if slopes:
            blocks = in_blocks(weights, slopes)
            self._task = join_blocks(gate_gradients(self.groups, weight, slope, leading=1) for weight, slope in blocks)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Step the scores, and add the gradient that ties the weights to them."""
        found = {name: leaves[name].grad for name in self.names}
        slopes = {name: slope for name, slope in found.items() if slope is not None}
        trees = (slopes, self.scores, self.absent, self.at, self._weights(leaves), self._task)
        for slope, score, absent, at, weights, task in in_blocks(*trees):
            gradients, of_norms = self.steps.gradients(self.groups, score, absent, at, weights, task)
            for name, gradient in gradients.items():
                score[name].copy_(self.steps.descended(score[name], gradient))
            add_row_gradients(self.groups, of_norms, weights, slope)

    def _weights(self, leaves: Leaves) -> dict[str, Tensor]:
        return {name: leaves[name].detach() for name in self.names}

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback its scores."""
        for place, callback in enumerate(callbacks):
            callback.steps.scores = row_of(self.scores, place)


class StackedImportance(StackedScores):
    """Counterpart of :class:`LearnedImportance` with given groups of units and without a pass of its own.

    Args:
        callbacks: One callback for each client.
        module: Module of the clients.
    """

    per_client: ClassVar[tuple[str, ...]] = (
        *StackedScores.per_client,
        "counts",
        "ranking",
        "kept",
        "masks",
        "aside",
        "stencils",
    )
    in_order = ("places",)

    def __init__(self, callbacks: Sequence[LearnedImportance], module: nn.Module) -> None:
        self.of, self.places = callbacks[0], range(len(callbacks))
        groups, size = tuple(self.of.given_groups or ()), len(callbacks)
        whole = {group.name: torch.ones(group.size, dtype=torch.bool) for group in groups}
        names = list(unit_masks(groups, whole, dict(module.named_parameters())))
        at = {group.name: torch.arange(group.size) for group in groups}
        super().__init__([each.steps for each in callbacks], groups, [{}] * size, [at] * size, names)
        for each in callbacks:
            if each.steps.scores:
                check_scores(groups, each.steps.scores)
        counts = [unit_counts(groups, each.density) for each in callbacks]
        self.counts = {name: torch.tensor([own[name] for own in counts]) for name in whole}
        self.kept = {name: torch.zeros(size, len(units), dtype=torch.bool) for name, units in whole.items()}
        self.ranking: dict[str, Tensor] = {}
        """Order of the units, for a pattern that does not depend on weights; the largest are kept."""
        if self.of.pattern not in ("learned", "magnitude"):
            self.ranking = stack_trees([blind_ranking(groups, c.pattern, c.seed, c.turn) for c in callbacks])
        self.masks: dict[str, Tensor] = {}
        self.aside: dict[str, Tensor] = {}
        """Values of the dropped weights."""
        self.stencils: dict[str, InPlaceMask] = {}
        self._whole: Leaves = {}
        self._optimizer: Any = None

    def start(self, leaves: Leaves) -> None:
        """Allocate the masks and the dropped values of each client; all weights are there at first."""
        weights = self._weights(leaves)
        self.masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
        self.aside = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.absent = self._norms(self.aside)
        if self.of.pattern == "learned" and not self.scores:
            self.scores = {name: torch.zeros_like(norm) for name, norm in self.absent.items()}
        super().start(leaves)
        self._whole = leaves
        self.stencils = {name: InPlaceMask(mask, weights[name].dtype) for name, mask in self.masks.items()}
        self.zeros = LastingZeros(self.stencils, leaves)

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Keep the optimizer, which forgets dropped weights, and find out whether these stay 0 in a step."""
        self._optimizer = optimizer
        self.zeros.prepare(self, optimizer, chain)

    def after_hooks(self) -> None:
        """Zero the weights of dropped units, which hooks may have written."""
        self.zeros.restore()

    @torch.no_grad()
    def before_batch(self, batch: StackedPass) -> None:
        """Choose the units: at the start, and after every step if they may change."""
        leaves, first = batch.leaves, batch.steps[0] == 0
        if first and self.of.pattern == "learned" and not self.of.steps.scores:
            for name, score in relative(self._norms(self._weights(leaves))).items():
                self.scores[name].copy_(score)
        if first or self.of.refresh == "step":
            self._choose(leaves)
        self.zeros.before_batch(leaves)

    def _choose(self, leaves: Leaves) -> None:
        """Keep the units that rank highest; clients for which nothing changes are left alone."""
        ranking = self._ranking(leaves)
        kept = {name: _largest(ranking[name], count) for name, count in self.counts.items()}
        changed = torch.stack([(units != self.kept[name]).any(1) for name, units in kept.items()]).any(0).tolist()
        for rows in block_rows(self.aside):
            if any(changed[rows]):
                self._exchange(leaves, rows, {name: units[rows] for name, units in kept.items()})

    def _ranking(self, leaves: Leaves) -> Weights:
        if self.of.pattern == "magnitude":
            weights = self._weights(leaves)
            return self._norms({n: torch.where(self.masks[n], w, self.aside[n]) for n, w in weights.items()})
        return self.scores if self.of.pattern == "learned" else self.ranking

    def _norms(self, weights: Weights) -> dict[str, Tensor]:
        """Return the norms of each client's units."""
        return join_blocks(unit_norms(self.groups, block, leading=1) for (block,) in in_blocks(weights))

    def _exchange(self, leaves: Leaves, rows: slice, kept: Weights) -> None:
        """Replace the units of a block of clients; see :class:`LearnedImportance`.

        Args:
            leaves: Weights of all clients.
            rows: Places of the clients of the block; those whose units stay keep their bits.
            kept: Units that each of them keeps, of shape (clients of the block, units).
        """
        first, asides = self.places.start, {name: aside[rows] for name, aside in self.aside.items()}
        for name, mask in broadcast_unit_masks(self.groups, kept, self._weights(leaves)).items():
            weight, stencil = leaves[name].detach()[rows], self.stencils[name][rows]
            stencil.join_(weight, asides[name])
            self.masks[name][rows] = mask  # which the stencil has a view of
            stencil.split_(weight, asides[name])
            forget(self._optimizer, self._whole[name], mask, slice(first + rows.start, first + rows.stop))
        for tree, values in ((self.kept, kept), (self.absent, unit_norms(self.groups, asides, leading=1))):
            for name, value in values.items():
                tree[name][rows] = value

    def after_backward(self, batch: StackedPass) -> None:
        """Take the scores' gradient, if they are trained."""
        if self.of.pattern == "learned":
            super().after_backward(batch)

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Step the scores, add the gradient that ties the weights to them, and mask all gradients."""
        self.zeros.before_step(leaves, self.stencils)
        if self.of.pattern == "learned":
            super().before_step(leaves, steps)
        for name, stencil in self.stencils.items():
            if (grad := leaves[name].grad) is not None:
                stencil.zero_(grad)

    def after_step(self, leaves: Leaves) -> None:
        """Zero the weights of dropped units, unless they are 0 by themselves."""
        self.zeros.after_step(leaves, self.stencils)

    def end_epoch(self) -> None:
        """Zero the weights of dropped units, however they have been written."""
        self.zeros.restore()

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback its scores, its units and the dropped values."""
        for place, callback in enumerate(callbacks):
            if any(bool(units[place].any()) for units in self.kept.values()):  # else there was no batch
                trees = (self.scores, self.kept, self.masks, self.aside)
                callback.take_over(*({n: t.clone() for n, t in row_of(tree, place).items()} for tree in trees))


def _largest(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the units with the largest scores of each client, as :func:`keep_units` does for one.

    Args:
        scores: Scores of shape (clients, units).
        counts: Numbers of units that stay, of shape (clients,).

    Example:
        >>> _largest(torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 0.0, 1.0]]), torch.tensor([1, 2]))
        tensor([[False,  True, False],
                [False,  True,  True]])
    """
    numbers = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = numbers.sort(dim=1, descending=True, stable=True).indices
    first = torch.arange(scores.shape[1], device=scores.device) < counts.to(scores.device)[:, None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, first)


def scores_of(callbacks: Sequence[UnitScores], module: nn.Module) -> StackedScores | None:
    """Return the counterpart of callbacks; None if their modules have units in different places.

    Args:
        callbacks: One callback for each client.
        module: Module of the clients, the full one or one as narrow as theirs.
    """
    parameters = dict(module.named_parameters())
    groups, absent, at = zip(*(callback.units_in(parameters) for callback in callbacks), strict=True)
    if not alike(groups):
        return None
    return StackedScores([callback.steps for callback in callbacks], groups[0], absent, at, list(parameters))
