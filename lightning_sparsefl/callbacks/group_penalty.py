"""Penalty on the norms of whole layers or units, or on the scales of norms, that can grow during training.

Layers: Long, Anagnostopoulos, Puthiya Parambath, Bi, "FedDIP: Federated Learning with Extreme Dynamic Pruning and
Incremental Regularization", ICDM 2023, arXiv:2309.06805, eqs. 8 and 9. Units: Lym et al., "PruneTrain: fast neural
network training by dynamic sparse model reconfiguration", SC 2019, arXiv:1901.09290. Scales: Liu et al., "Learning
Efficient Convolutional Networks through Network Slimming", ICCV 2017, arXiv:1708.06519.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.example_input import example_inputs, for_module
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.layers import (
    choose,
    require_dense_gradients,
    require_maskable,
    require_units,
    stepped_by,
)
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.parts import norms_of
from lightning_sparsefl.sparse.schedule import staircase
from lightning_sparsefl.sparse.unit_lasso import lasso_slots, unit_lasso_gradients
from lightning_sparsefl.sparse.units import UnitGroup, find_groups

Units: TypeAlias = Sequence[UnitGroup] | Callable[[Mapping[str, Tensor]], Sequence[UnitGroup]]
"""Groups of units, or a function from the parameters of a module to them."""


class GroupPenalty(ReportedCallback):
    """Adds ``strength * sum over layers of ||w_layer||_2`` to the loss, by its gradient ``strength * w / ||w||_2``.

    The norm is not squared, so it is not differentiable at a layer of zeros; there the gradient is set to 0. The
    strength rises from 0 in equal stairs over the optimizer steps of a fit; the last one is one stair below `strength`.
    Alongside callbacks that mask, the norms are those of the pruned weights.

    With ``groups="units"`` the sum is over the units (channels, neurons, hidden states) of every layer, each with the
    norm ``sqrt(sum w^2 + 1e-8)`` of its outgoing row, and with that of the slice by which each next layer reads it; so
    whole units fade. Inputs and outputs of the network are no units.

    With ``groups="scales"`` the sum is over the absolute weights of all batch, group, layer and other norms, the scales
    of channels; a scale of zero has the gradient 0.

    Args:
        strength: Largest factor of the penalty, the paper's lambda_max, >= 0; 0 changes nothing. A table in
            docs/smaller_models.md has the shares of units that some strengths remove with SGD and Adam.
        stairs: Number of equal parts of the fit, >= 1, the first one without a penalty; None = constant strength.
        layers: Patterns of layer names or types, such as ``["type:Conv2d", "!head*"]``; None = all weights of
            linear, convolutional, recurrent, attention and embedding layers.
        groups: Whether the norms are those of layers or of units, or absolute scales of the module's norms.
        units: The module's groups of units, or a function from its parameters to them; None = they are found with the
            module's `example_input_array`.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, the module has no units or scales
            to penalise, the length of the training is unknown, a layer has sparse gradients, the callback comes after
            one that makes weights dense for the step, or `training_step` steps a bare optimizer.

    Example:
        >>> GroupPenalty(strength=0.01, stairs=None).strength
        0.01
    """

    @check_arguments
    def __init__(
        self,
        strength: float = 1e-3,
        stairs: int | None = 10,
        layers: list[str] | str | None = None,
        groups: Literal["layers", "units", "scales"] = "layers",
        units: Units | None = None,
    ) -> None:
        require(strength >= 0, "GroupPenalty", "strength", strength, "a number >= 0")
        require(stairs is None or stairs >= 1, "GroupPenalty", "stairs", stairs, "a whole number >= 1, or None")
        known = groups in ("layers", "units", "scales")
        require(known, "GroupPenalty", "groups", groups, "'layers', 'units' or 'scales'")
        apart = groups == "layers" or layers is None
        require(apart, "GroupPenalty", "layers", layers, f"None beside `groups={groups!r}`")
        super().__init__()
        self.strength, self.stairs, self.layers, self.groups, self.units = strength, stairs, layers, groups, units
        self._clock = StepClock()
        self._weights: list[Tensor] = []
        self._by_name: dict[str, Tensor] = {}
        self._found: Sequence[UnitGroup] = ()
        self._started = self._resumed = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that the weights are still pruned where the penalty reads them."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._started = self._resumed = False
        callbacks = list(trainer.callbacks)
        before = callbacks[: callbacks.index(self)] if self in callbacks else []
        joins = next((type(other).__name__ for other in before if isinstance(other, ErrorFeedback)), None)
        if joins is not None:
            raise InvalidOption(
                f"`GroupPenalty` comes after `{joins}`, which makes the weights dense for the step; expected it "
                "before, where they are pruned."
            )

    def held(self) -> Mapping[str, Tensor]:
        """Return the penalized weights of this fit."""
        return self._by_name

    def key_options(self) -> dict[str, Any]:
        """Return the layers, or what the groups are."""
        return {"layers": self.layers} if self.groups == "layers" else {"groups": self.groups}

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Choose the layers, or find the units or scales."""
        require_unscaled_gradients(trainer, "GroupPenalty")
        super().on_fit_start(trainer, pl_module)
        parameters = dict(pl_module.named_parameters())
        if self.groups == "layers":
            chosen = self.choose(pl_module)
        elif self.groups == "scales":
            chosen = scales_of(pl_module)
        else:
            self._found = self.find(pl_module, parameters)
            chosen = tuple(dict.fromkeys(slot.name for slot in lasso_slots(self._found, parameters)))
        require_dense_gradients(pl_module, chosen, "GroupPenalty")
        self._by_name = {name: parameters[name] for name in chosen}
        self._weights = list(self._by_name.values())

    def choose(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the penalized layers.

        Args:
            module: Module of the user.

        Raises:
            InvalidOption: If a parametrization computes one of their weights.
        """
        chosen = choose(module, self.layers, "GroupPenalty")
        require_maskable(module, chosen, "GroupPenalty", act="penalize")
        return chosen

    def find(self, module: Any, parameters: Mapping[str, Tensor]) -> Sequence[UnitGroup]:
        """Return the groups of units of a module.

        Args:
            module: Module, whose example input is used if the callback has no groups.
            parameters: Parameters of the module.

        Raises:
            InvalidOption: If there is neither, or the module has no units.
        """
        if callable(self.units):
            return self.units(parameters)
        if self.units is not None:
            return self.units
        sample, owner = example_inputs(module), "GroupPenalty(groups='units')"
        if sample is None:
            raise InvalidOption(
                f"`{owner}` finds units with the module's `example_input_array`, which `{type(module).__name__}` does "
                "not set; set it, or pass `units`."
            )
        groups = find_groups(module, *for_module(sample, module))
        require_units(groups, module, owner, "linear, convolutional or recurrent", ", or other `groups`")
        return groups

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Divide the fit into stairs."""
        self._started = True
        if self.stairs is not None:
            self._clock.start(trainer, "GroupPenalty", self._resumed)

    @property
    def now(self) -> float:
        """Strength at this step."""
        if self.stairs is None:
            return self.strength
        return staircase(self.strength, self.stairs, self._clock.step, self._clock.total)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the gradient of the term."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        strength, stepping = self.now, stepped_by(optimizer)
        weights = [weight for weight in self._weights if weight.grad is not None and id(weight) in stepping]
        if strength == 0 or not weights:
            return
        if self.groups == "units":
            for name, gradient in unit_lasso_gradients(self._found, self._by_name).items():
                slope = self._by_name[name].grad
                if slope is not None and id(self._by_name[name]) in stepping:
                    slope.add_(gradient, alpha=strength)
            return
        if self.groups == "scales":
            for weight in weights:
                assert weight.grad is not None
                weight.grad.add_(weight.sign(), alpha=strength)
            return
        for weight, norm in zip(weights, torch._foreach_norm(weights), strict=True):
            assert weight.grad is not None
            weight.grad.addcmul_(weight, torch.where(norm > 0, strength / norm, 0.0))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the steps."""
        if self.stairs is not None:
            self._clock.tick(trainer)

    def _release(self) -> None:
        super()._release()
        self._weights, self._by_name, self._resumed = [], {}, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position on the stairs, and whether a fit has begun."""
        return {"clock": self._clock.state_dict(), "started": self._started or self._resumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of a checkpoint."""
        self._resumed = state_dict["started"]
        self._clock.load_state_dict(state_dict["clock"])


def scales_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of all norms.

    Args:
        module: Module.

    Raises:
        InvalidOption: If it has none.
    """
    norms = norms_of(module)
    scales = tuple(n for n, _ in module.named_parameters() if n in norms and n.rpartition(".")[2] == "weight")
    if not scales:
        raise InvalidOption(
            f"`GroupPenalty(groups='scales')` finds no norm with weights in `{type(module).__name__}`; expected one, "
            "or other `groups`."
        )
    return scales
