"""Training of thresholds below which a unit is off.

Kim, Saad, Debbah, Hong, "SpaFL: Communication-efficient federated learning with sparse models and low computational
overhead", NeurIPS 2024, arXiv:2406.00431, section 3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.options import require
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.conv1d import inputs_come_first
from lightning_sparsefl.sparse.thresholds import follow_all, keep_rows, live_share, threshold_gradients
from lightning_sparsefl.types import Weights

_LEAST_LIVE, _LARGEST = 0.01, 5.0


class UnitThresholds(Reparameterized):
    """Trains weights and a threshold for each output unit; a unit is off unless its mean magnitude exceeds it.

    The weights of a unit that is off are 0 in the model and train on here. Thresholds are stepped by the optimizer that
    steps the layer, with its momentum and decay and under common clipping, by gradients that pass the step function
    unchanged, and by those of ``strength * sum exp(-threshold)``. They stay in [-5, 5], and those of a layer return to
    0 if at most 1 % of its units are on. Biases have no threshold.

    Args:
        strength: Factor of the term that increases thresholds, >= 0.
        thresholds: First thresholds by layer, which determine the layers; None = 0 for all units.
        history: Common thresholds of earlier rounds by layer, ``(rounds, units)``, whose changes the first weights
            follow; see :func:`~lightning_sparsefl.sparse.thresholds.follow`.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If the strength is negative, a layer is a transposed convolution, another callback is a
            `BaseFinetuning`, or the base class refuses the module.

    Example:
        >>> UnitThresholds(strength=0.01).thresholds
        {}
    """

    _of_a_fit = (*Reparameterized._of_a_fit, "_trained")

    def __init__(
        self,
        strength: float = 0.002,
        thresholds: Weights | None = None,
        history: Weights | None = None,
        layers: list[str] | str | None = None,
    ) -> None:
        require(strength >= 0, "UnitThresholds", "strength", strength, "a number >= 0")
        super().__init__(layers)
        self.strength = strength
        self._thresholds, self._history = dict(thresholds or {}), history or {}

    def _unhook(self) -> None:
        super()._unhook()
        self._trained: dict[str, nn.Parameter] = {}

    @property
    def thresholds(self) -> Weights:
        """Thresholds by layer; empty before the first fit, unless they were given."""
        return self._thresholds

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the layers whose weights or thresholds were given or trained before."""
        return tuple(self._theta or self._thresholds)

    def chosen(self, module: LightningModule) -> tuple[str, ...]:
        """Return the names of the layers with thresholds."""
        names = super().chosen(module)
        require_units_first(module, names)
        return names

    def first(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight after the changes of earlier rounds."""
        history = self._history.get(name)
        return weight if history is None else follow_all(weight, history.to(weight))

    def started(self) -> None:
        """Make parameters of the thresholds."""
        for name, weight in self._weights.items():
            first = self._thresholds.get(name)
            values = weight.new_zeros(len(weight)) if first is None else first.detach().to(weight, copy=True)
            self._trained[name] = nn.Parameter(values.detach())
        self.stepped()

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Hand the thresholds to the optimizers."""
        require_unscaled_gradients(trainer, "UnitThresholds")
        _refuse_finetuning(trainer)
        super().on_fit_start(trainer, pl_module)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                ours = {id(parameter) for parameter in group["params"]}
                group["params"] += [self._trained[n] for n, weight in self._weights.items() if id(weight) in ours]

    def shown(self, name: str, theta: Tensor) -> Tensor:
        """Return the weight of the units that are on, and zeros."""
        return keep_rows(theta, self._thresholds[name])

    def slope(self, name: str, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight, and note that of its thresholds."""
        own, pull = threshold_gradients(theta, gradient, self._thresholds[name])
        self._trained[name].grad = pull - self.strength * (-self._thresholds[name]).exp()
        return own

    @torch.no_grad()
    def stepped(self) -> None:
        """Bound the thresholds, and return those of a layer to 0 that has hardly a unit left."""
        for name, parameter in self._trained.items():
            parameter.clamp_(-_LARGEST, _LARGEST)
            if live_share(self._theta[name], parameter) <= _LEAST_LIVE:
                parameter.zero_()
            self._thresholds[name] = parameter.detach().clone()

    def release(self) -> None:
        """Take the thresholds and their memory out of the optimizers, and release the module."""
        trained = {id(parameter) for parameter in self._trained.values()}
        for guard in self._guards:
            optimizer = guard.optimizer
            for parameter in self._trained.values():
                optimizer.state.pop(parameter, None)
            for group in optimizer.param_groups if trained & stepped_by(optimizer) else ():
                group["params"] = [each for each in group["params"] if id(each) not in trained]
        super().release()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the thresholds."""
        return super().state_dict() | {"thresholds": dict(self._thresholds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the weights and the thresholds of a checkpoint."""
        self._thresholds = dict(state_dict["thresholds"])
        super().load_state_dict(state_dict)


def _refuse_finetuning(trainer: Any) -> None:
    """Refuse callbacks that look up the names of all parameters of the optimizers: thresholds are not in the module."""
    other = next((type(each).__name__ for each in trainer.callbacks if isinstance(each, BaseFinetuning)), None)
    if other is not None:
        raise InvalidOption(
            f"`UnitThresholds`, which SpaFL trains with, does not support `{other}`, a `BaseFinetuning`: it stores the "
            "names of all parameters in the optimizers, and thresholds have no names in the module; expected one of "
            "the two callbacks."
        )


def require_units_first(module: nn.Module, names: Collection[str]) -> None:
    """Refuse weights whose rows are not the weights of an output unit, such as those of transposed convolutions.

    Args:
        module: Module of the user.
        names: Names of the weights that have thresholds.

    Raises:
        InvalidOption: Naming the first of them.

    Example:
        >>> require_units_first(nn.Sequential(nn.ConvTranspose2d(6, 4, 2)), ["0.weight"])
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `UnitThresholds`: `0.weight` of a ConvTranspose2d has a row for each \
input instead of each unit; expected `layers` that leave it out.
    """
    for path, layer in module.named_modules():
        if inputs_come_first(layer):
            own = next((name for name, _ in layer.named_parameters(path) if name in names), None)
            if own is not None:
                raise InvalidOption(
                    f"`UnitThresholds`: `{own}` of a {type(layer).__name__} has a row for each input instead of each "
                    "unit; expected `layers` that leave it out."
                )
