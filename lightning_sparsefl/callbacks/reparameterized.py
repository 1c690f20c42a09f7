"""Training of numbers of which the module's weights are a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.holding import HoldingCallback
from lightning_sparsefl.callbacks.layers import (
    choose,
    pattern_list,
    plain_name,
    require_dense_gradients,
    require_maskable,
    stepped_by,
)
from lightning_sparsefl.callbacks.mask_owner import MaskOwner, renamed
from lightning_sparsefl.callbacks.masking import make_masks
from lightning_sparsefl.callbacks.step_guard import StepGuard, refuse_lbfgs
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.types import Weights


class Reparameterized(HoldingCallback):
    """Base class: the module holds ``f(theta)`` wherever it is looked at, and the optimizer steps theta.

    Theta has the shapes of the weights and is kept here. It takes their place in the module for the optimizer's step
    only, with its own gradients, so that clipping, momentum and weight decay act on theta. What others write into
    these weights during a fit is lost. A subclass states f, its derivative, and what may change in a step.

    A second `fit` goes on with the theta of the first one, so that another module needs a callback of its own. Put
    callbacks that add to the gradients of the weights before this one, and one that masks after it.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        theta: Values of theta by name to start from, which determine the layers; None = those of `first`.

    Raises:
        InvalidOption: If the optimizer is LBFGS, a weight is complex, an embedding has sparse gradients, a
            parametrization computes a weight whose zeros are others, or another such callback has the same weights,
            returns earlier values to them, or grows some from 0 that would stay there.
        IncompatibleMasks: If `theta` does not fit the module.
    """

    _of_a_fit: tuple[str, ...] = ("_weights", "_guards", "_inside", "_prepared", "log", "log_dict")

    def __init__(self, layers: list[str] | str | None = None, theta: Weights | None = None) -> None:
        self.layers = layers
        self._theta: dict[str, Tensor] = dict(theta or {})
        self._given = None if theta is None else tuple(theta)
        self._unhook()

    def _unhook(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._guards: list[StepGuard] = []
        self._inside: list[str] = []
        self._prepared = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the references to a fit that is under way."""
        return {name: value for name, value in vars(self).items() if name not in self._of_a_fit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in the state outside of a fit."""
        self._unhook()
        vars(self).update(state)

    def key_options(self) -> dict[str, Any]:
        """Return the layers."""
        return {"layers": pattern_list(self.layers), "theta": self._given}

    def held(self) -> Weights:
        """Return the weights of this fit that are a function of theta."""
        return self._weights

    @property
    def theta(self) -> Weights:
        """Theta by name; empty before the first fit, unless it was given."""
        return self._theta

    # ---- what a subclass states

    @property
    def stays_at_zero(self) -> bool:
        """Whether a weight of 0 has a theta without gradient. Default: no."""
        return False

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the layers that were given or trained before; empty where `layers` chooses them."""
        return tuple(self._theta)

    def chosen(self, module: LightningModule) -> tuple[str, ...]:
        """Return the names of the layers."""
        return self.given or choose(module, self.layers, type(self).__name__)

    def first(self, name: str, weight: Tensor) -> Tensor:
        """Return the theta that the first fit starts from. Default: the weight."""
        return weight

    def started(self) -> None:
        """Act when a fit starts, before the weights are shown."""

    def shown(self, name: str, theta: Tensor) -> Tensor:
        """Return ``f(theta)``."""
        raise NotImplementedError

    def slope(self, name: str, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of theta, given that of ``f(theta)``."""
        raise NotImplementedError

    def settled(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return theta after a step, given its values before and after it. Default: the latter."""
        return after

    # ---- the exchange around a step

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Take up the weights of a fit, and show ``f(theta)`` in them.

        Args:
            weights: Weights by name, which are written into.

        Raises:
            IncompatibleMasks: If theta has another shape.
        """
        self._weights = dict(weights)
        for name, weight in self._weights.items():
            theta = self._theta[name] if name in self._theta else self.first(name, weight.detach())
            if theta.shape != weight.shape:
                shapes = f"{tuple(theta.shape)}, expected {tuple(weight.shape)}"
                raise IncompatibleMasks(f"`{type(self).__name__}`: theta of `{name}` has shape {shapes}.")
            self._theta[name] = theta.detach().to(weight.device, weight.dtype, copy=True)
        self.started()
        self._show(self._weights)

    @torch.no_grad()
    def _show(self, names: Any) -> None:
        for name in names:
            self._weights[name].copy_(self.shown(name, self._theta[name]))

    @torch.no_grad()
    def enter(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Put theta into the module, and its gradients in the place of those of ``f(theta)``.

        Args:
            gradients: Gradients by name, which are written into.
        """
        for name, gradient in gradients.items():
            if name in self._inside:
                continue
            if gradient is not None:
                gradient.copy_(self.slope(name, self._theta[name], gradient))
            self._weights[name].copy_(self._theta[name])
            self._inside.append(name)

    @torch.no_grad()
    def leave(self) -> None:
        """Take theta out of the module after a step, and show ``f(theta)`` there."""
        inside, self._inside = self._inside, []
        for name in inside:
            stepped = self._weights[name].detach().clone()
            self._theta[name] = self.settled(name, self._theta[name], stepped)
        if inside:
            self.stepped()
        self._show(inside)

    def stepped(self) -> None:
        """Act after a step, before the weights are shown."""

    # ---- Lightning's hooks

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Choose the layers, unless theta has been given or trained before, and show ``f(theta)``."""
        make_masks(trainer, pl_module)
        parameters: dict[str, Tensor] = dict(pl_module.named_parameters())
        self._theta = renamed(self._theta, parameters)
        names = self.chosen(pl_module)
        unknown = next((name for name in names if name not in parameters), None)
        if unknown is not None:
            raise IncompatibleMasks(f"`{type(self).__name__}`: `{unknown}` in theta is not a parameter of the module.")
        require_dense_gradients(pl_module, names, type(self).__name__)
        require_maskable(pl_module, names, type(self).__name__, by_layers=not self.given, act="train")
        self._refuse_complex(parameters, names)
        self._refuse_others(trainer, names)
        self._refuse_masks(trainer, pl_module, names)
        self.begin({name: parameters[name] for name in names})

    def _refuse_complex(self, parameters: Weights, names: tuple[str, ...]) -> None:
        """Refuse complex weights, whose functions here have no complex derivative."""
        unreal = next((name for name in names if parameters[name].is_complex()), None)
        if unreal is not None:
            layer = unreal.rpartition(".")[0] or unreal
            raise InvalidOption(
                f"`{type(self).__name__}` cannot train `{unreal}`, which is complex; expected real weights, so take "
                f"the layer away with '!{layer}*' in `layers`."
            )

    def _refuse_others(self, trainer: Any, names: tuple[str, ...]) -> None:
        for other in trainer.callbacks:
            if other is self or not isinstance(other, Reparameterized):
                continue
            both = {plain_name(name) for name in names} & {plain_name(name) for name in other._weights}
            if both:
                raise InvalidOption(
                    f"`{type(self).__name__}` and `{type(other).__name__}` both train `{min(both)}` as a function of "
                    "other numbers; keep one of them, or give them `layers` that do not overlap."
                )

    def _refuse_masks(self, trainer: Any, module: LightningModule, names: tuple[str, ...]) -> None:
        """Refuse masks whose owner writes values that theta would not follow, or grows weights that would stay 0."""
        mine = {plain_name(name) for name in names}
        for other in trainer.callbacks:
            fault = self._fault(other) if isinstance(other, MaskOwner) else None
            both = mine & {plain_name(name) for name in other.claims(module)} if fault is not None else ()
            if both:
                raise InvalidOption(
                    f"`{type(other).__name__}` {fault} `{min(both)}`, which `{type(self).__name__}` trains as a "
                    "function of other numbers; keep one of them, or give them `layers` that do not overlap."
                )

    def _fault(self, other: MaskOwner) -> str | None:
        """Return what masks do to weights, as the start of a clause, that does not go with this callback."""
        if other.writes_values:
            return "returns earlier values to"
        return "grows weights that would stay 0 in" if other.grows_from_zero and self.stays_at_zero else None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse LBFGS, and guard the steps of all other optimizers."""
        refuse_lbfgs(self, trainer.optimizers, "which evaluates the loss in the middle of its step")
        self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Put theta and its gradients into the module, for the weights of this optimizer."""
        ours = stepped_by(optimizer)
        self.enter({name: weight.grad for name, weight in self._weights.items() if id(weight) in ours})
        self._prepared = True

    def before_loss(self, again: bool) -> None:
        """Show ``f(theta)`` to a closure, also in a step that evaluates the loss several times."""
        self._prepared = False
        self.leave()

    def before_update(self, optimizer: Any) -> None:
        """Put theta into the module for a step that Lightning does not know of, such as one of the bare optimizer."""
        if not self._prepared:
            self.on_before_optimizer_step(None, None, optimizer)  # type: ignore[arg-type]

    def after_step(self, optimizer: Any) -> None:
        """Show ``f(theta)`` right after the step: a module may read its weights before the batch ends."""
        self._prepared = False
        self.leave()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show ``f(theta)``, also where mixed precision skipped the step."""
        self._prepared = False
        self.leave()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the module; theta stays."""
        self.release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the module also where the run failed, since Lightning calls no teardown then."""
        self.release()

    def release(self) -> None:
        """Leave ``f(theta)`` in the module, and release its tensors and the optimizers."""
        self.leave()
        for guard in self._guards:
            guard.remove()
        self._unhook()

    def state_dict(self) -> dict[str, Any]:
        """Return theta."""
        return {"theta": dict(self._theta)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore theta of a checkpoint."""
        self._theta = dict(state_dict["theta"])
        if self._weights:
            self.begin(self._weights)
