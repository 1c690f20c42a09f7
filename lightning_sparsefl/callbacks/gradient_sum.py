"""Sums of the gradients of a fit.

Importance for pruning: the squared sum of a fit's gradients, or the sum of their squares, as in PruneFL (Jiang et al.,
arXiv:1909.12326).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.options import check_arguments
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback


class GradientSum(ReportedCallback):
    """Adds up the gradients of all optimizer steps of a fit, as they are before clipping.

    Before callbacks that mask, the gradients are dense: they also tell of weights that are pruned. A parameter without
    a gradient has zeros. Steps with gradients that are not finite, which loss scaling skips, do not count.
    Before `MetaStep`, the gradients of its batches without a step are added as well.

    Args:
        squares: Whether to add up the squared gradients as well.

    Attributes:
        sums: Sum of the gradients, by the parameter's name; empty before a fit.
        squares: Sum of the squared gradients; empty without `squares`.

    Raises:
        InvalidOption: If `training_step` steps a bare optimizer.

    Example:
        >>> GradientSum().sums
        {}
    """

    @check_arguments
    def __init__(self, squares: bool = False) -> None:
        super().__init__()
        self._squared = squares
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin new sums, which a checkpoint may replace."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.sums, self.squares = {}, {}

    def held(self) -> dict[str, Tensor]:
        """Return the parameters whose gradients are added up."""
        return self._parameters

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Allocate the sums, beside the parameters."""
        require_unscaled_gradients(trainer, "GradientSum")
        super().on_fit_start(trainer, pl_module)
        self._parameters = dict(pl_module.named_parameters())
        for tree in (self.sums, self.squares) if self._squared else (self.sums,):
            for name, parameter in self._parameters.items():
                dtype = torch.promote_types(parameter.dtype, torch.float32)  # sums in bfloat16 stop growing at 256
                total = tree[name] if name in tree else torch.zeros_like(parameter, dtype=dtype)
                tree[name] = total.to(parameter.device, dtype)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the gradients of this optimizer."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        stepping = stepped_by(optimizer)
        found = {n: p.grad for n, p in self._parameters.items() if p.grad is not None and id(p) in stepping}
        gradients = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}
        if not gradients:
            return
        counts = torch.stack([grad.isfinite().all() for grad in gradients.values()]).all()
        for name, grad in gradients.items():
            gradient = torch.where(counts, grad, 0.0).to(self.sums[name].dtype)
            self.sums[name].add_(gradient)
            if self._squared:
                self.squares[name].addcmul_(gradient, gradient)

    def _release(self) -> None:
        super()._release()
        self._parameters = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"sums": dict(self.sums), "squares": dict(self.squares)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        self.sums, self.squares = dict(state_dict["sums"]), dict(state_dict["squares"])
