"""Gradient that keeps weights near those that training started from."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import require_dense_gradients, stepped_by
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.mask_owner import of_parameters
from lightning_sparsefl.callbacks.masking import make_masks
from lightning_sparsefl.callbacks.options import check_arguments
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Weights


class ProximalTerm(ReportedCallback):
    """Adds ``strength / 2 * ||w - anchor||^2`` to the loss, by its gradient (FedProx, arXiv:1812.06127, eq. 2).

    Args:
        strength: Factor of the term, the paper's mu; 0 changes nothing.
        anchor: Weights by name to stay near; default: the weights when training starts. A name that is missing has no
            term, and names of buffers have no effect.

    Raises:
        IncompatibleMasks: If `anchor` names no tensor of the module, or has another shape than the parameter.
        InvalidOption: If the strength is negative, an embedding has sparse gradients, or `training_step` steps a bare
            optimizer.

    Example:
        >>> ProximalTerm(strength=0.1).strength
        0.1
    """

    @check_arguments
    def __init__(self, strength: float = 0.01, anchor: Weights | None = None) -> None:
        if not strength >= 0:
            raise InvalidOption(f"`ProximalTerm(strength={strength})`: expected a number >= 0.")
        super().__init__()
        self.strength, self.anchor = strength, anchor
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self._resumed: Weights | None = None
        self._taken: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit without an anchor, unless one is given or a checkpoint has one."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._taken, self._resumed = {}, None

    def held(self) -> Weights:
        """Return the parameters that have a term."""
        return {name: parameter for name, (parameter, _) in self._pairs.items()}

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Copy the anchor, since training writes into the weights."""
        require_unscaled_gradients(trainer, "ProximalTerm")
        super().on_fit_start(trainer, pl_module)
        make_masks(trainer, pl_module)
        parameters = dict(pl_module.named_parameters())
        first = self._resumed or {name: p.detach() for name, p in parameters.items()}
        given = first if self.anchor is None else self.anchor
        self._resumed = None
        anchor = of_parameters(given, pl_module, "ProximalTerm", "anchor")
        require_dense_gradients(pl_module, anchor, "ProximalTerm")
        anchor = {n: value.to(parameters[n].device, parameters[n].dtype, copy=True) for n, value in anchor.items()}
        self._pairs = {name: (parameters[name], value) for name, value in anchor.items()}
        if self.anchor is None:
            self._taken = anchor

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the gradient of the term, for the weights of this optimizer."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        stepping = stepped_by(optimizer)
        for parameter, anchor in self._pairs.values():
            if parameter.grad is not None and id(parameter) in stepping:
                parameter.grad.add_(parameter - anchor, alpha=self.strength)

    def state_dict(self) -> dict[str, Any]:
        """Return the anchor, unless it was given."""
        return {"anchor": self._taken or self._resumed or {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the anchor of a checkpoint."""
        self._resumed = state_dict["anchor"]
