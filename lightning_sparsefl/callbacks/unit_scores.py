"""Training of the scores of units whose choice is made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.loss_scaling import loss_scale, require_unscaled_gradients
from lightning_sparsefl.sparse.importance import Reduction, add_row_gradients, gate_gradients, narrow_groups, tie
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks, unit_norms
from lightning_sparsefl.types import Masks, Weights


class ScoreSteps:
    """The scores of a module's units, and their gradient descent; see :class:`LearnedImportance` for the equations.

    Args:
        scores: Scores of each group, one number a unit.
        lr: Learning rate of the scores.
        strength: Factor of the term that ties scores and magnitudes.
        reduction: Reduction of that term over all units.
    """

    def __init__(self, scores: Weights, lr: float, strength: float, reduction: Reduction) -> None:
        self.scores = {name: score.detach().clone() for name, score in scores.items()}
        self.lr, self.strength, self.reduction = lr, strength, reduction
        self._task: Weights = {}

    def follow(self, groups: Sequence[UnitGroup], weights: Weights, absent: Weights, at: Weights | None = None) -> None:
        """Set the units and weights whose scores are trained.

        Args:
            groups: Groups of units of the module.
            weights: Parameters of the module.
            absent: Part of the norms that is not in the module, for each group and all its units.
            at: Numbers of the units that the module has, if it was cut.
        """
        self._groups, self._weights, self._absent = groups, weights, absent
        device = next(iter(weights.values())).device
        self.scores = {name: score.to(device) for name, score in self.scores.items()}
        self._at = at or {name: torch.arange(len(score), device=device) for name, score in self.scores.items()}

    def look(self, trainer: Any) -> None:
        """Take the task's gradient after a backward pass, before another callback adds to it."""
        scale = loss_scale(trainer)
        slopes = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        self._task = {n: g / scale for n, g in gate_gradients(self._groups, self._weights, slopes).items()}

    def step(self) -> dict[str, Tensor]:
        """Step the scores, and return the gradient that ties the norms of units to the scores before the step."""
        gradients, of_norms = self.gradients(
            self._groups, self.scores, self._absent, self._at, self._weights, self._task
        )
        self.descend(gradients)
        return of_norms

    def pull(self, optimizer: Any, of_norms: Weights) -> None:
        """Add the gradient of the norms to the gradients of those weights that an optimizer steps.

        Args:
            optimizer: Optimizer that is about to step.
            of_norms: Gradients from :meth:`step`.
        """
        ours = stepped_by(optimizer)
        weights = {name: weight for name, weight in self._weights.items() if id(weight) in ours}
        slopes = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        add_row_gradients(self._groups, of_norms, weights, slopes)

    def gradients(
        self,
        groups: Sequence[UnitGroup],
        scores: Weights,
        absent: Weights,
        at: Mapping[str, Tensor],
        weights: Weights,
        task: Weights,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients of scores, and of the norms of units that are tied to them; nothing is changed.

        All tensors may have the same leading dimension, that of several clients.

        Args:
            groups: Groups of units of the module.
            scores: Scores of each group.
            absent: Part of the norms that is not in the module, for each group and all its units.
            at: Numbers of the units that the module has.
            weights: Parameters of the module.
            task: Gradients of the scores that come from the loss, for the units that the module has.
        """
        leading = next(iter(absent.values())).dim() - 1 if absent else 0
        present = unit_norms(groups, weights, leading)
        norms = {n: norm.scatter_add(-1, at[n], present[n].detach()) for n, norm in absent.items()}
        own, lengths = tie(scores, norms, self.reduction)
        own = {name: self.strength * gradient for name, gradient in own.items()}
        for name, part in task.items():
            own[name] = own[name].scatter_add(-1, at[name], part.to(own[name].dtype))
        return own, {name: self.strength * gradient.gather(-1, at[name]) for name, gradient in lengths.items()}

    def descend(self, gradients: Weights) -> None:
        """Take a gradient step of the scores."""
        self.scores |= {name: self.descended(self.scores[name], gradient) for name, gradient in gradients.items()}

    def descended(self, score: Tensor, gradient: Tensor) -> Tensor:
        """Return scores after a gradient step, except where mixed precision has overflown."""
        stepped = score - self.lr * gradient
        return torch.where(stepped.isfinite(), stepped, score)


class UnitScores(Callback):
    """Trains scores as :class:`LearnedImportance` does, of units that are masked or cut out elsewhere.

    Args:
        steps: Scores, which also hold the result.
        groups: Groups of units of the full module.
        kept: Units of each group that are trained, as bool tensors.
        weights: Weights of the full module when the fit starts.
    """

    def __init__(self, steps: ScoreSteps, groups: Sequence[UnitGroup], kept: Masks, weights: Weights) -> None:
        self.steps, self.groups, self.kept, self.weights = steps, groups, kept, weights
        self._of_norms: Weights = {}
        self._stepped = False

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Determine whether the module is the full one, or has the kept units only."""
        require_unscaled_gradients(trainer, "UnitScores")
        parameters = dict(pl_module.named_parameters())
        groups, absent, at = self.units_in(parameters)
        self.steps.follow(groups, parameters, absent, at)

    def units_in(self, parameters: Weights) -> tuple[Sequence[UnitGroup], Weights, Weights]:
        """Return the groups of units of a module, the part of the norms that it has not, and the numbers of its units.

        Args:
            parameters: Parameters of the module, the full one or one that has the kept units only.
        """
        masks = unit_masks(self.groups, self.kept, self.weights)
        absent = unit_norms(self.groups, subtract(self.weights, apply(self.weights, masks)))
        if all(self.weights[name].shape == parameter.shape for name, parameter in parameters.items()):
            return (
                self.groups,
                absent,
                {name: torch.arange(len(norm), device=norm.device) for name, norm in absent.items()},
            )
        at = {name: units.nonzero().flatten() for name, units in self.kept.items()}
        return narrow_groups(self.groups, self.kept, self.weights), absent, at

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take the scores' gradient."""
        self.steps.look(trainer)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Step the scores, and add the gradient that ties the weights to them."""
        if not self._stepped:
            self._of_norms, self._stepped = self.steps.step(), True
        self.steps.pull(optimizer, self._of_norms)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reset for the next step."""
        self._stepped = False
