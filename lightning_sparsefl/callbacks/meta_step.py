"""Steps by the gradient of the loss after a step of adaptation.

Finn, Abbeel, Levine, "Model-agnostic meta-learning", arXiv:1703.03400, section 2.2, as in Fallah, Mokhtari, Ozdaglar,
"Personalized federated learning: a meta-learning approach", arXiv:2002.07948, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.loss_scaling import is_skipped, require_unscaled_gradients
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.second_pass import SecondPoint, gradient_at, trainable
from lightning_sparsefl.sparse.masks import descend
from lightning_sparsefl.types import Weights


class MetaStep(SecondPoint):
    """Steps once per pair or triple of batches, by the gradient of the loss after a step of SGD.

    With ``order="first"``, the first batch of a pair gives ``w' = w - lr * grad f(w)`` and no step of the optimizer; on
    the second one the optimizer steps w by ``g = grad f(w')``. With ``order="hessian"``, a third batch gives the
    product with the Hessian of f at w, as a central difference of gradients, and the optimizer steps by
    ``g - lr * H g``.

    Without a step, gradients are None, so that momentum and weight decay do not act either, and schedulers count the
    batches. Where gradients are accumulated, a "batch" is the batches of one step of the optimizer. A tuple may extend
    over epochs; one that is incomplete when the fit ends is left out. Optimizers other than LBFGS are supported.

    Args:
        lr: Learning rate of the adaptation (the paper's alpha), >= 0.
        order: Whether the second derivative is left out, or taken from a third batch.
        delta: Distance of the difference, in units of g, above 0.

    Raises:
        InvalidOption: If an option is out of its range, or the module optimizes manually.

    Example:
        >>> MetaStep(lr=0.01).order
        'first'
    """

    fits_masks_before = returns_weights = True

    @check_arguments
    def __init__(self, lr: float, order: Literal["first", "hessian"] = "first", delta: float = 1e-3) -> None:
        require(lr >= 0, "MetaStep", "lr", lr, "a number >= 0")
        require(order in ("first", "hessian"), "MetaStep", "order", order, "'first' or 'hessian'")
        require(delta > 0, "MetaStep", "delta", delta, "a number above 0")
        super().__init__()
        self.lr, self.order, self.delta = lr, order, delta
        self._clip: float | None = None
        """The trainer's `gradient_clip_val`, which is None in a batch without a step."""
        self._begin()

    def _begin(self) -> None:
        """Begin a tuple."""
        self._batch = 0
        self._adapted: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}
        self._below: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit with a new tuple, unless a checkpoint has an open one."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._begin()

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Move an open tuple to the module's device."""
        super().on_fit_start(trainer, pl_module)
        require_unscaled_gradients(trainer, "MetaStep")
        parameters = dict(pl_module.named_parameters())
        for tree in (self._adapted, self._slopes, self._below):
            tree.update({name: value.to(parameters[name].device) for name, value in tree.items()})

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the weights into the module at which this batch of the tuple is passed."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._batch == 1:
            self.go(pl_module, self._adapted)
        elif self._batch == 2:
            weights = {name: p.detach() for name, p in trainable(pl_module).items() if name in self._slopes}
            below = descend(weights, self._slopes, self.delta)
            for name, slope in gradient_at(trainer, pl_module, batch, batch_idx, below).items():
                part = slope / trainer.accumulate_grad_batches
                self._below[name] = self._below[name] + part if name in self._below else part
            self.go(pl_module, descend(weights, self._slopes, -self.delta))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Restore the trainer's `gradient_clip_val`."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._clip_again(trainer)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the module and let the trainer clip again, also where the run failed within a batch."""
        super().on_exception(trainer, pl_module, exception)
        self._clip_again(trainer)

    def _clip_again(self, trainer: Any) -> None:
        if self._clip is not None:
            trainer.gradient_clip_val, self._clip = self._clip, None

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Put the module's weights back, and replace or remove the gradients."""
        self.back()
        parameters = trainable(pl_module)
        slopes = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if not slopes or is_skipped(trainer, parameters.values()):  # a skipped batch is in no tuple
            self._below = {}
            return
        if self._batch == 0:
            weights = {name: parameters[name].detach() for name in slopes}
            self._adapted = descend(weights, slopes, self.lr)
            self._skip_step(trainer, parameters)
        elif self._batch == 1 and self.order == "hessian":
            self._slopes = slopes
            self._skip_step(trainer, parameters)
        else:
            if self._batch == 2:
                self._correct(parameters, slopes)
            self.clear_others(pl_module, optimizer)
            self._begin()

    def _skip_step(self, trainer: Any, parameters: Mapping[str, Tensor]) -> None:
        """Remove the gradients, so that this batch has no step; without gradients, torch cannot clip by value."""
        self._batch += 1
        self._clip, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        for parameter in parameters.values():
            parameter.grad = None

    def _correct(self, parameters: Mapping[str, Tensor], above: Weights) -> None:
        """Give the parameters the gradient of the second batch, less the product with the Hessian."""
        for name, parameter in parameters.items():
            slope = self._slopes.get(name)
            if slope is not None and name in above and name in self._below:
                product = (above[name] - self._below[name]) / (2 * self.delta)
                slope = slope - self.lr * product
            parameter.grad = slope

    def state_dict(self) -> dict[str, Any]:
        """Return the open tuple."""
        trees = {"adapted": self._adapted, "slopes": self._slopes, "below": self._below}
        return {"batch": self._batch, **{key: dict(tree) for key, tree in trees.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the open tuple of a checkpoint."""
        self._batch = state_dict["batch"]
        self._adapted, self._slopes = dict(state_dict["adapted"]), dict(state_dict["slopes"])
        self._below = dict(state_dict["below"])
