"""Penalty on the smallest weights, with a raised learning rate, before they are pruned.

Huang, Zhuang, Chen, Lyu, "FedMef: Towards memory-efficient federated dynamic pruning", CVPR 2024, arXiv:2403.14737.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.layers import choose, require_dense_gradients, require_maskable, stepped_by
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.mask_owner import check_masks, renamed
from lightning_sparsefl.callbacks.masking import make_masks
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback
from lightning_sparsefl.callbacks.step_guard import StepGuard
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks, Weights


class BudgetAwareExtrusion(ReportedCallback):
    """Adds ``strength * sum over layers of ||w_low||_2`` to the loss, by its gradient, and raises the learning rate.

    w_low are the smallest kept weights of each layer at the first batch; they stay the same for the fit. With b the
    step of B, each step has the learning rate ::

        min(max_lr, max(lr, psi * (2 B - 2 b) / (2 B - b) * (2 sigmoid(||w_low||_1) - 1) * lr_0))

    where lr is that of the module's schedule and lr_0 that of the first step of the group of parameters. Put the
    callback before one that masks.

    Args:
        strength: Factor of the penalty, >= 0.
        share: Fraction of each layer's kept weights that are penalized, in [0, 1].
        psi: Factor of the raised learning rate, >= 0.
        max_lr: Upper bound of the learning rate, > 0.
        masks: Masks of the kept weights by name; None = weights of linear, convolutional, recurrent, attention and
            embedding layers that are not zero at the first batch.

    Raises:
        InvalidOption: If an option is out of its range, the length of the training is unknown, a layer has sparse
            gradients, or `training_step` steps a bare optimizer.
        IncompatibleMasks: If `masks` do not fit the module.

    Example:
        >>> BudgetAwareExtrusion(share=0.2).share
        0.2
    """

    @check_arguments
    def __init__(
        self,
        strength: float = 0.01,
        share: float = 0.5,
        psi: float = 1.0,
        max_lr: float = 0.1,
        masks: Masks | None = None,
    ) -> None:
        require(strength >= 0, "BudgetAwareExtrusion", "strength", strength, "a number >= 0")
        require(0 <= share <= 1, "BudgetAwareExtrusion", "share", share, "a number in [0, 1]")
        require(psi >= 0, "BudgetAwareExtrusion", "psi", psi, "a number >= 0")
        require(max_lr > 0, "BudgetAwareExtrusion", "max_lr", max_lr, "a number above 0")
        super().__init__()
        self.strength, self.share, self.psi, self.max_lr, self.masks = strength, share, psi, max_lr, masks
        self._clock = StepClock()
        self._low: dict[str, Tensor] = {}
        self._first: list[list[float]] = []
        self._resumed = False
        self._forget()

    def _forget(self) -> None:
        """Set the references to a fit's module to their values outside of a fit."""
        self._weights: dict[str, Tensor] = {}
        self._guards: list[StepGuard] = []
        self._rates: dict[int, list[float]] = {}
        self._starts: dict[int, list[float]] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit, which a checkpoint may continue."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._low, self._first, self._resumed = {}, [], False

    def held(self) -> dict[str, Tensor]:
        """Return the weights that may be penalized."""
        return self._weights

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Choose the weights to penalize."""
        require_unscaled_gradients(trainer, "BudgetAwareExtrusion")
        super().on_fit_start(trainer, pl_module)
        parameters = dict(pl_module.named_parameters())
        if self.masks is not None:
            self.masks = renamed(self.masks, parameters)
            check_masks("BudgetAwareExtrusion(masks=...)", self.masks, parameters)
        names = choose(pl_module, None, "BudgetAwareExtrusion") if self.masks is None else self.masks
        require_maskable(pl_module, tuple(names), "BudgetAwareExtrusion", by_layers=False, act="penalize")
        require_dense_gradients(pl_module, tuple(names), "BudgetAwareExtrusion")
        self._weights = {name: parameters[name] for name in names}
        if self.masks is not None:
            make_masks(trainer, pl_module)
            self._choose()
        self._low = {name: low.to(self._weights[name].device) for name, low in self._low.items()}

    def _choose(self) -> None:
        """Choose the weights to penalize, unless a checkpoint or an earlier batch has done so."""
        if not self._low:
            self._low = self.smallest({name: weight.detach() for name, weight in self._weights.items()})

    def smallest(self, weights: Weights) -> dict[str, Tensor]:
        """Return masks of the smallest kept weights of each layer.

        Args:
            weights: Weights of the layers by name.
        """
        alive = {n: w != 0 if self.masks is None else self.masks[n].to(w.device) for n, w in weights.items()}
        largest = {n: kept - floor_count(self.share, kept) for n, kept in counts(alive).items()}
        stay = shrink(magnitude(weights), alive, largest)
        return {name: alive[name] & ~stay[name] for name in stay}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store the first learning rates, and be called around all steps."""
        self._clock.start(trainer, "BudgetAwareExtrusion", self._resumed)
        if not self._first:
            self._first = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._starts = {id(o): rates for o, rates in zip(trainer.optimizers, self._first, strict=True)}
        self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Choose the weights to penalize at the first batch, when other callbacks have pruned what they prune first."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._choose()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the gradient of the penalty."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        stepping = stepped_by(optimizer)
        for name, weight in self._weights.items():
            if weight.grad is not None and id(weight) in stepping and self.strength:
                low = weight * self._low[name]
                norm = low.norm()
                weight.grad.addcmul_(low, torch.where(norm > 0, self.strength / norm, 0.0))

    def before_loss(self, again: bool) -> None:
        """Do nothing before the loss."""

    @torch.no_grad()
    def before_update(self, optimizer: Any) -> None:
        """Raise the learning rates for a step."""
        if id(optimizer) in self._rates:
            return
        size = sum(float((weight * self._low[name]).abs().sum()) for name, weight in self._weights.items())
        factor = self.psi * decay(self._clock.step, self._clock.total) * math.tanh(size / 2)  # 2 sigmoid(x) - 1
        rates, firsts = [group["lr"] for group in optimizer.param_groups], self._starts[id(optimizer)]
        firsts += rates[len(firsts) :]  # of groups that have been added since, as by `BackboneFinetuning`
        self._rates[id(optimizer)] = rates
        for group, first in zip(optimizer.param_groups, firsts, strict=True):
            group["lr"] = min(self.max_lr, max(float(group["lr"]), factor * float(first)))

    def after_step(self, optimizer: Any) -> None:
        """Restore the learning rates, which schedules read."""
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), []), strict=False):
            group["lr"] = rate

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the steps."""
        self._clock.tick(trainer)

    def _release(self) -> None:
        for guard in self._guards:
            guard.remove()
        super()._release()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the penalized weights' places, the first learning rates, and the position in the fit."""
        return {"low": dict(self._low), "first": [list(r) for r in self._first], "clock": self._clock.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._low, self._first = dict(state_dict["low"]), [list(rates) for rates in state_dict["first"]]
        self._clock.load_state_dict(state_dict["clock"])
        self._resumed = bool(self._low)


def decay(step: int, total: int) -> float:
    """Return ``(2 B - 2 b) / (2 B - b)``, from 1 at step b = 0 to 0 at step B.

    Example:
        >>> decay(0, 10), decay(10, 10)
        (1.0, 0.0)
    """
    return max(0.0, (2 * total - 2 * step) / max(1, 2 * total - step))
