"""Second weights that are trained as a part of a mixture.

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", arXiv:2003.13461, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import first_stepped
from lightning_sparsefl.callbacks.loss_scaling import is_skipped
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.second_pass import SecondPoint, gradient_at, learning_rates, trainable
from lightning_sparsefl.sparse.masks import interpolate
from lightning_sparsefl.types import Weights


class PersonalMixture(SecondPoint):
    """Trains second weights v such that the mixture ``alpha * v + (1 - alpha) * w`` fits, beside the module's w.

    At the start of each batch it takes the gradient g of the loss at the mixture. With each step of the module's
    optimizer, ``v <- v - lr * alpha * g`` at the optimizer's learning rate: plain SGD, without clipping, momentum and
    weight decay. The training of w is as without the callback. If `adaptive`, the first step of a fit also moves
    ``alpha <- alpha - lr * <v - w, g>``, clipped to [0, 1], with the values before the step.

    Gradients are accumulated as the module's are. A second `fit` goes on with v and alpha of the first one. LBFGS is
    refused.

    Args:
        alpha: Share of the second weights in the mixture, in [0, 1].
        adaptive: Whether the share is trained.
        personal: Second weights by name; names that are missing start from the module's weights.

    Raises:
        InvalidOption: If the share is out of its range, or the module optimizes manually.
        IncompatibleMasks: If `personal` does not fit the module.

    Example:
        >>> PersonalMixture(alpha=0.25).alpha
        0.25
    """

    @check_arguments
    def __init__(self, alpha: float, adaptive: bool = False, personal: Weights | None = None) -> None:
        require(0 <= alpha <= 1, "PersonalMixture", "alpha", alpha, "a number in [0, 1]")
        super().__init__()
        self.alpha, self.adaptive = alpha, adaptive
        self.personal = dict(personal or {})
        self._slopes: dict[str, Tensor] = {}
        self._due = adaptive

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit, whose first step moves an adaptive share."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._slopes, self._due = {}, self.adaptive

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Copy the second weights, since training writes into them."""
        super().on_fit_start(trainer, pl_module)
        self.personal = self.copied(pl_module, self.personal)
        self._slopes = {name: slope.to(self.personal[name]) for name, slope in self._slopes.items()}

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the gradient at the mixture."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        weights = {name: p.detach() for name, p in trainable(pl_module).items()}
        mixture = interpolate({name: self.personal[name] for name in weights}, weights, self.alpha)
        for name, slope in gradient_at(trainer, pl_module, batch, batch_idx, mixture).items():
            part = slope / trainer.accumulate_grad_batches
            self._slopes[name] = self._slopes[name] + part if name in self._slopes else part

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Step the second weights, and the share if it is due."""
        parameters, rates = trainable(pl_module), learning_rates(optimizer)
        if is_skipped(trainer, parameters.values()):
            self._slopes = {}
            return
        slope = sum(float(((self.personal[n] - parameters[n]) * g).sum()) for n, g in self._slopes.items())
        for name, gradient in self._slopes.items():
            self.personal[name].sub_(gradient, alpha=rates.get(id(parameters[name]), 0.0) * self.alpha)
        group = first_stepped(optimizer.param_groups)
        if self._due and group is not None:
            self.alpha, self._due = min(1.0, max(0.0, self.alpha - float(group["lr"]) * slope)), False
        self._slopes = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the second weights, the share, and gradients that wait for a step."""
        return {"personal": self.personal, "alpha": self.alpha, "slopes": self._slopes, "due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the second weights and the share of a checkpoint."""
        self.personal, self.alpha = dict(state_dict["personal"]), state_dict["alpha"]
        self._slopes, self._due = dict(state_dict["slopes"]), state_dict["due"]
