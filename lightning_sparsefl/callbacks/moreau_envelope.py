"""Training of weights by their Moreau envelope.

Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", arXiv:2006.08848, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import require_dense_gradients
from lightning_sparsefl.callbacks.loss_scaling import is_skipped, require_unscaled_gradients
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.second_pass import SecondPoint, gradient_at, learning_rates, trainable
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Weights


class MoreauEnvelope(SecondPoint):
    """Trains weights w towards personal weights theta, which minimize ``f(theta) + strength / 2 * ||theta - w||^2``.

    Theta starts from the module's weights when a fit starts, and is kept between batches. Each batch makes `steps`
    steps ``theta <- theta - lr * (grad f(theta) + strength * (theta - w))`` of plain SGD, all with the same dropout.
    Then the module's optimizer gets ``strength * (w - theta)`` as the gradient of w, to which clipping, momentum and
    weight decay apply. The last of the `steps` is the module's own training step, so that what it logs and its
    running statistics are those of theta. Where gradients are accumulated, the last step is made with the mean
    gradient of several batches. Where loss scaling skips the module's step, the last step is left out too.

    Args:
        strength: Factor of the term (the paper's lambda), above 0; times the optimizer's learning rate below 1.
        lr: Learning rate of the personal weights, above 0.
        steps: Number of steps of the personal weights for each batch (K).
        decay: Weight decay of the personal weights.

    Raises:
        InvalidOption: If an option is out of its range, w would pass theta, the module optimizes manually, or an
            embedding has sparse gradients.

    Example:
        >>> MoreauEnvelope(strength=15.0, lr=0.1).steps
        5
    """

    returns_weights = True

    @check_arguments
    def __init__(self, strength: float, lr: float, steps: int = 5, decay: float = 0.0) -> None:
        require(strength > 0, "MoreauEnvelope", "strength", strength, "a number above 0")
        require(lr > 0, "MoreauEnvelope", "lr", lr, "a number above 0")
        require(steps >= 1, "MoreauEnvelope", "steps", steps, "a whole number >= 1")
        require(decay >= 0, "MoreauEnvelope", "decay", decay, "a number >= 0")
        super().__init__()
        self.strength, self.lr, self.steps, self.decay = strength, lr, steps, decay
        self.personal: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit without personal weights, unless a checkpoint has them."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.personal = {}

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Copy the personal weights, since training writes into them."""
        super().on_fit_start(trainer, pl_module)
        require_unscaled_gradients(trainer, "MoreauEnvelope")
        require_dense_gradients(pl_module, trainable(pl_module), "MoreauEnvelope")
        self.personal = self.copied(pl_module, self.personal)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make all steps of the personal weights but the last, and put them into the module for that."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        weights = trainable(pl_module)
        for _ in range(self.steps - 1):
            self._descend(gradient_at(trainer, pl_module, batch, batch_idx, self.personal), weights)
        self.go(pl_module, self.personal)

    @torch.no_grad()
    def _descend(self, slopes: Weights, weights: Weights) -> None:
        """Make a step of the personal weights."""
        for name, slope in slopes.items():
            theta = self.personal[name]
            theta.sub_(slope + self.strength * (theta - weights[name]) + self.decay * theta, alpha=self.lr)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Make the last step of the personal weights, and give the module's weights and gradients back."""
        self._check(learning_rates(optimizer).values())
        parameters = {name: p for name, p in trainable(pl_module).items() if p.grad is not None}
        self.back()
        if is_skipped(trainer, parameters.values()):
            return
        self._descend({name: p.grad for name, p in parameters.items() if p.grad is not None}, parameters)
        for name, parameter in parameters.items():
            parameter.grad = self.strength * (parameter.detach() - self.personal[name])
        self.clear_others(pl_module, optimizer)

    def _check(self, rates: Any) -> None:
        product = self.strength * max(rates, default=0.0)
        if not product < 1:
            raise InvalidOption(
                f"`MoreauEnvelope(strength={self.strength})`, the `lam` of PFedMe, times the optimizer's learning rate "
                f"is {product:.3g}; expected a product below 1, since weights would otherwise pass the personal ones: "
                "lower one of the two."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the personal weights."""
        return {"personal": self.personal}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the personal weights of a checkpoint."""
        self.personal = dict(state_dict["personal"])
