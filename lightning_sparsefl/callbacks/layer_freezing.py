"""Training of some layers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_sparsefl.callbacks.holding import HoldingCallback
from lightning_sparsefl.callbacks.layers import plain_name, require_initialized, stepped_by
from lightning_sparsefl.callbacks.mask_owner import check_masks, packed, renamed, unpacked
from lightning_sparsefl.callbacks.masking import make_masks
from lightning_sparsefl.callbacks.options import check_arguments
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.callbacks.step_guard import StepGuard
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.apply import InPlaceMask
from lightning_sparsefl.types import Masks


class LayerFreezing(HoldingCallback):
    """Keeps weights as they are where `trainable` is False; it never zeroes them.

    A tensor that is False throughout gets no gradient at all, so that the backward pass stops below the earliest
    trainable layer (PerFedMask, Setayesh et al. 2023, section 3). A tensor that is False in part has its gradient
    masked and its frozen entries restored right after each step. Their values are those with which the fit started;
    checkpoints have them, since a mask that moves may have made some of them 0 meanwhile.

    Args:
        trainable: Bool tensors by name, True = may change; a missing name trains.

    Raises:
        IncompatibleMasks: If `trainable` does not fit the module.
        InvalidOption: If no parameter of the module may change, one in `trainable` has no shape yet, or a callback
            behind this one trains one that is frozen in part as a function of other numbers.
    """

    @check_arguments
    def __init__(self, trainable: Masks) -> None:
        self.trainable = dict(trainable)
        self._first: dict[str, tuple[Tensor, Tensor]] = {}
        """Masks of frozen entries and their values, 0 elsewhere, of tensors that are frozen in part."""
        self._held: dict[str, Tensor] = {}
        self._frozen: list[Tensor] = []
        self._partly: list[tuple[Tensor, InPlaceMask, Tensor]] = []
        self._theta: list[tuple[Reparameterized, str, InPlaceMask, Tensor]] = []
        """Callbacks that train tensors frozen in part as functions of other numbers, with these where frozen."""
        self._guards: list[StepGuard] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Freeze the parameters that exist at this point, before the optimizers are created."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._first = {}
            parameters = dict(pl_module.named_parameters())
            self._freeze(parameters, renamed(self.trainable, parameters))

    def _freeze(self, parameters: Mapping[str, Tensor], trainable: Masks) -> None:
        for name, mask in trainable.items():
            parameter = parameters.get(name)
            if parameter is None or is_lazy(parameter) or not parameter.requires_grad:
                continue
            if not mask.any():
                self._frozen.append(parameter.requires_grad_(False))

    def held(self) -> dict[str, Tensor]:
        """Return the parameters that are frozen, or have frozen entries."""
        return self._held

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store the values of frozen entries, now that layers are made, loaded, masked and on their device."""
        make_masks(trainer, pl_module)
        parameters: dict[str, Tensor] = dict(pl_module.named_parameters())
        trainable = renamed(self.trainable, parameters)
        require_initialized({name: parameters[name] for name in trainable if name in parameters}, "LayerFreezing")
        check_masks("LayerFreezing(trainable=...)", trainable, parameters)
        self._held = {name: parameters[name] for name, mask in trainable.items() if not mask.all()}
        self._freeze(parameters, trainable)
        if self._frozen and not any(parameter.requires_grad for parameter in parameters.values()):
            raise InvalidOption(
                "`LayerFreezing(trainable=...)`: no parameter of the module is left to train; expected one that may "
                "change."
            )
        first, self._first = {plain_name(name): pair for name, pair in self._first.items()}, {}
        for name, parameter in parameters.items():
            mask = trainable.get(name)
            if mask is not None and parameter.requires_grad and not mask.all():
                stencil = InPlaceMask(mask.to(parameter.device), parameter.dtype)
                values = torch.empty_like(parameter, requires_grad=False)
                self._restore(parameter, first.get(plain_name(name)))
                stencil.split_(parameter.detach().clone(), values)
                self._partly.append((parameter, stencil, values))
                self._first[name] = (~mask, values)

    @staticmethod
    @torch.no_grad()
    def _restore(parameter: Tensor, first: tuple[Tensor, Tensor] | None) -> None:
        """Restore the values that frozen entries have in a checkpoint; a mask over them is applied again later."""
        if first is not None:
            frozen, values = (tensor.to(parameter.device) for tensor in first)
            parameter.copy_(torch.where(frozen, values.to(parameter.dtype), parameter))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Register for calls around all optimizer steps, if entries are frozen."""
        self._refuse_before(trainer)
        self._keep_theta(trainer)
        self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers if self._partly]

    def _refuse_before(self, trainer: Any) -> None:
        """Refuse a callback behind this one whose theta is in the module when frozen entries are restored."""
        behind = trainer.callbacks[trainer.callbacks.index(self) + 1 :] if self in trainer.callbacks else ()
        for other in behind:
            both = self._first.keys() & other.theta.keys() if isinstance(other, Reparameterized) else ()
            if both:
                raise InvalidOption(
                    f"`LayerFreezing` comes before `{type(other).__name__}`, which trains `{min(both)}` as a function "
                    "of other numbers; expected it after, where the weights are frozen instead of those numbers."
                )

    def _keep_theta(self, trainer: Any) -> None:
        """Store the numbers of which frozen entries are a function, with which another fit would start."""
        for other in trainer.callbacks:
            theta = other.theta if isinstance(other, Reparameterized) else {}
            for name, (_, stencil, _) in zip(self._first, self._partly, strict=True):
                if name in theta:
                    values = torch.empty_like(theta[name])
                    stencil.split_(theta[name].clone(), values)
                    self._theta.append((other, name, stencil, values))

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Drop the gradients of frozen entries."""
        self.before_update(optimizer)

    def before_loss(self, again: bool) -> None:
        """Do nothing before the loss."""

    def before_update(self, optimizer: Any) -> None:
        """Drop the gradients of frozen entries, also in a step that Lightning does not know of."""
        for parameter, stencil, _ in self._partly:
            if parameter.grad is not None:
                stencil.zero_(parameter.grad)

    @torch.no_grad()
    def after_step(self, optimizer: Any) -> None:
        """Restore frozen entries, which momentum or weight decay may have moved, before others read the weights."""
        stepped = stepped_by(optimizer)
        for parameter, stencil, values in self._partly:
            if id(parameter) in stepped:
                stencil.join_(parameter, values)
        for other, name, stencil, values in self._theta:
            stencil.join_(other.theta[name], values)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Make the frozen tensors trainable again."""
        self._thaw()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the tensors also where the run failed, since Lightning calls no teardown then."""
        self._thaw()

    def state_dict(self) -> dict[str, Any]:
        """Return which entries are frozen, one bit a weight, and their values."""
        frozen = {name: mask for name, (mask, _) in self._first.items()}
        values = {name: tensor[frozen[name].to(tensor.device)] for name, (_, tensor) in self._first.items()}
        return {"frozen": packed(frozen), "values": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of frozen entries of a checkpoint."""
        frozen, values = unpacked(state_dict["frozen"]), state_dict["values"]
        self._first = {name: (mask, _spread(mask, values[name])) for name, mask in frozen.items()}

    def _thaw(self) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for guard in self._guards:
            guard.remove()
        self._held, self._frozen, self._partly, self._theta, self._guards = {}, [], [], [], []


def _spread(mask: Tensor, values: Tensor) -> Tensor:
    """Return a tensor that has the values where a mask is True, and 0 elsewhere.

    Example:
        >>> _spread(torch.tensor([True, False, True]), torch.tensor([1.0, 2.0]))
        tensor([1., 0., 2.])
    """
    spread = values.new_zeros(mask.shape)
    spread[mask.to(values.device)] = values
    return spread
