"""Gradients at a second point, on the batch that the module trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.mask_owner import MaskOwner, of_parameters
from lightning_sparsefl.callbacks.numbered import NumberedCallback
from lightning_sparsefl.callbacks.ordered_dropout import OrderedDropout
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.callbacks.step_guard import refuse_lbfgs
from lightning_sparsefl.callbacks.trial import trial, trial_loss
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Weights


def gradient_at(trainer: Any, module: LightningModule, batch: Any, batch_idx: int, weights: Weights) -> Weights:
    """Return the gradient of the training loss of a batch at other weights; parameters without one are missing.

    Module and batch are afterwards as before: weights and gradients, buffers, metrics and random numbers, and what
    :func:`~lightning_sparsefl.callbacks.trial.copy_of` copies of the batch. So each call before the training step draws
    the same dropout as the training step. In a `Trainer` with several processes it is their mean gradient.

    Args:
        trainer: Trainer of the module.
        module: Module of the user.
        batch: Batch on the module's device.
        batch_idx: Index of the batch within the epoch.
        weights: Weights to take the gradient at; parameters that are missing have the module's values.

    Raises:
        InvalidOption: If the training step returns no loss.
    """
    parameters = trainable(module)
    with placed(parameters, weights), trial(module), torch.enable_grad():
        with trainer.precision_plugin.forward_context():
            loss = trial_loss(module, batch, batch_idx)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    slopes = {name: slope for name, slope in zip(parameters, found, strict=True) if slope is not None}
    return {name: trainer.strategy.reduce(slope) for name, slope in slopes.items()}


def trainable(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters of a module that are not frozen, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def learning_rates(optimizer: Any) -> dict[int, float]:
    """Return the learning rate of each parameter of an optimizer, by the parameter's ``id``.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> learning_rates(torch.optim.SGD([weight], lr=0.5)) == {id(weight): 0.5}
        True
    """
    return {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}


@contextmanager
def placed(parameters: dict[str, Tensor], weights: Weights) -> Iterator[None]:
    """Give parameters other values within the context, and restore their own afterwards.

    Args:
        parameters: Parameters by name.
        weights: Values by name; a name that is missing keeps its value, and other names are ignored.
    """
    before = write(parameters, weights)
    try:
        yield
    finally:
        write(parameters, before)


@torch.no_grad()
def write(parameters: dict[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """Copy values into parameters, and return the values that were there.

    Args:
        parameters: Parameters by name.
        weights: Values by name; other names are ignored.

    Example:
        >>> weight = torch.zeros(2)
        >>> write({"w": weight}, {"w": torch.ones(2)}), weight
        ({'w': tensor([0., 0.])}, tensor([1., 1.]))
    """
    before = {name: p.detach().clone() for name, p in parameters.items() if name in weights}
    for name in before:
        parameters[name].copy_(weights[name])
    return before


class SecondPoint(NumberedCallback):
    """Base class of callbacks that make passes at other points than the module's weights.

    A training step may be done at such a point; from the optimizer's step on, and so in validation and in checkpoints,
    the module holds its own weights.
    """

    fits_masks_before = False
    """Whether its passes are under the masks of callbacks that come before it."""
    returns_weights = False
    """Whether it returns weights to earlier values between batches, which callbacks before it would not notice."""

    def __init__(self) -> None:
        self._moved: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse a module that optimizes manually, which has no one training loss, and callbacks that do not fit."""
        self._refuse_others(trainer)
        if not pl_module.automatic_optimization:
            raise InvalidOption(
                f"`{type(self).__name__}` does not support `{type(pl_module).__name__}`, which optimizes manually; "
                "expected `automatic_optimization = True`."
            )

    def _refuse_others(self, trainer: Any) -> None:
        """Refuse masks that do not hold, another callback of this kind, and one behind this that draws units."""
        name, callbacks = type(self).__name__, list(trainer.callbacks)
        unmasked = unmasked_pass(callbacks)
        if unmasked is not None:
            raise InvalidOption(unmasked)
        place = callbacks.index(self) if self in callbacks else len(callbacks)
        keeping = [other for other in callbacks[:place] if isinstance(other, ErrorFeedback | Reparameterized)]
        if self.returns_weights and keeping:
            raise InvalidOption(
                f"`{type(keeping[0]).__name__}` comes before `{name}` and keeps numbers beside the weights, which the "
                "latter returns to earlier values; expected one of the two."
            )
        for other in callbacks[place + 1 :]:
            if isinstance(other, SecondPoint):
                raise InvalidOption(
                    f"`{name}` and `{type(other).__name__}` both pass batches at weights of their own; expected one of "
                    "them."
                )
            if isinstance(other, OrderedDropout):
                raise InvalidOption(
                    f"`{name}` comes before `OrderedDropout`, which draws the units of a batch when it starts; "
                    "expected it after."
                )

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse LBFGS, which evaluates the loss several times within a step."""
        refuse_lbfgs(self, trainer.optimizers, "which evaluates the loss several times within a step")

    def copied(self, module: LightningModule, personal: Weights) -> dict[str, Tensor]:
        """Return copies of weights on the module's device; parameters that are missing are copied from the module.

        Args:
            module: Module of the user.
            personal: Weights by name; those of buffers are left out.

        Raises:
            IncompatibleMasks: If a name is of no tensor of the module, or a shape differs.
        """
        given = of_parameters(personal, module, type(self).__name__, "personal")
        parameters = module.named_parameters()
        return {n: given.get(n, p.detach()).to(p.device, p.dtype, copy=True) for n, p in parameters}

    def clear_others(self, module: LightningModule, optimizer: Any) -> None:
        """Clear the gradients of weights that the optimizer leaves alone, which its `zero_grad` would let add up.

        Args:
            module: Module of the user.
            optimizer: Optimizer that is about to step.
        """
        stepped = learning_rates(optimizer)
        for parameter in module.parameters():
            if id(parameter) not in stepped:
                parameter.grad = None

    def go(self, module: LightningModule, weights: Weights) -> None:
        """Put other weights into the module for its next training step.

        Args:
            module: Module of the user.
            weights: Weights by name.
        """
        self._moved = trainable(module)
        self._own = write(self._moved, weights)

    def back(self) -> None:
        """Put the module's own weights back, if others are there."""
        write(self._moved, self._own)
        self._moved, self._own = {}, {}

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the module's own weights back, if a batch was skipped."""
        self.back()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Put the module's own weights back, if gradients are accumulated and there was no step."""
        self.back()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put the module's own weights back, if the last batch was skipped."""
        self.back()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the module."""
        self.back()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the module also where the run failed, since Lightning calls no teardown then."""
        self.back()


def unmasked_pass(callbacks: Sequence[Callback]) -> str | None:
    """Return which callback passes batches at weights that another one does not mask, as a sentence; else None.

    Args:
        callbacks: Callbacks of a fit, in their order.
    """
    owners = [(place, each) for place, each in enumerate(callbacks) if isinstance(each, MaskOwner)]
    passing = [(place, each) for place, each in enumerate(callbacks) if isinstance(each, SecondPoint)]
    for index, one in passing:
        for place, owner in owners:
            fits = one.fits_masks_before and not owner.masks_each_batch
            if not fits or place > index:
                expected = "the masks before it" if fits else "one of the two"
                return (
                    f"`{type(one).__name__}` passes batches at weights of its own, which `{type(owner).__name__}` does "
                    f"not mask; expected {expected}."
                )
    return None
