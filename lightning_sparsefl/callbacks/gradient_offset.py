"""Addition of fixed tensors to every gradient.

SCAFFOLD's control variates ``c - c_i`` (Karimireddy et al., arXiv:1910.06378, algorithm 1), and the linear term of
FedDyn's local loss (Acar et al., arXiv:2111.04263, eq. 1).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import require_dense_gradients, stepped_by
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.mask_owner import of_parameters
from lightning_sparsefl.callbacks.options import check_arguments
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback
from lightning_sparsefl.types import Weights


class GradientOffset(ReportedCallback):
    """Adds a linear term ``sum <offset, w>`` to the loss, by its gradient: once per optimizer step, before clipping.

    It joins gradients that are accumulated and unscaled, and only those of the optimizer that steps. A parameter that
    has no gradient, since it is frozen or not used, is left alone. Put the callback before one that masks.

    Args:
        offset: Tensors by name, of the parameters' shapes; a name that is missing has no offset, and names of buffers
            have no effect.

    Raises:
        IncompatibleMasks: If `offset` names no tensor of the module, or has another shape than the parameter.
        InvalidOption: If it names an embedding with sparse gradients, or `training_step` steps a bare optimizer.

    Example:
        >>> callback = GradientOffset({"weight": torch.ones(2, 3)})
        >>> list(callback.offset)
        ['weight']
    """

    @check_arguments
    def __init__(self, offset: Weights) -> None:
        super().__init__()
        self.offset = offset
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def held(self) -> Weights:
        """Return the parameters that have an offset."""
        return {name: parameter for name, (parameter, _) in self._pairs.items()}

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Pair the offset with the parameters, on their device and in their type."""
        require_unscaled_gradients(trainer, "GradientOffset")
        super().on_fit_start(trainer, pl_module)
        offset = of_parameters(self.offset, pl_module, "GradientOffset", "offset")
        require_dense_gradients(pl_module, offset, "GradientOffset")
        parameters = dict(pl_module.named_parameters())
        self._pairs = {name: (parameters[name], value.to(parameters[name])) for name, value in offset.items()}

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the offset to the gradients of this optimizer."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        stepping = stepped_by(optimizer)
        for parameter, offset in self._pairs.values():
            if parameter.grad is not None and id(parameter) in stepping:
                parameter.grad.add_(offset)

    def _release(self) -> None:
        super()._release()
        self._pairs = {}
