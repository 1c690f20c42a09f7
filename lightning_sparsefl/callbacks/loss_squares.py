"""Mean of the squared losses of a fit.

Oort's utility of a client is its number of samples times the root of the mean squared loss (Lai et al., OSDI 2021,
arXiv:2010.06081, section 4.2). The loss there is that of each sample; that of a batch, which is all that a module
returns, underestimates it, since the square of a mean is at most the mean of the squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.numbered import NumberedCallback
from lightning_sparsefl.callbacks.options import check_arguments


class LossSquares(NumberedCallback):
    """Logs the mean of the squared losses of all batches since the start of the fit, at the end of each epoch.

    The loss is what ``training_step`` returns. If it returns none, as manual optimization may, nothing is logged. With
    several devices the mean is that over all of them.

    Args:
        key: Key of the log.

    Example:
        >>> LossSquares().key
        'train_loss_sq'
    """

    @check_arguments
    def __init__(self, key: str = "train_loss_sq") -> None:
        self.key = key
        self._total: Tensor | float = 0.0
        self._batches = 0
        self._resumed = False

    def key_options(self) -> dict[str, Any]:
        """Return the key of the log."""
        return {"key": self.key}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin a new sum, unless a checkpoint has one."""
        if not self._resumed:
            self._total, self._batches = 0.0, 0
        self._resumed = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of a batch, which Lightning has divided by the number of batches of a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            whole = loss.detach().float() * trainer.accumulate_grad_batches
            self._total = self._total + torch.square(whole)
            self._batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the mean."""
        if self._batches:
            pl_module.log(self.key, self._total / self._batches, sync_dist=True)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget what was loaded for this run."""
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the number of batches."""
        return {"total": float(self._total), "batches": self._batches}

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the mean of the sums of all processes, each of which goes on with it."""
        if trainer.world_size > 1:
            total = torch.as_tensor(self._total, device=pl_module.device)
            mean = float(trainer.strategy.reduce(total, reduce_op="mean"))
            checkpoint["callbacks"][self.state_key] = {**self.state_dict(), "total": mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sum of a checkpoint."""
        self._total, self._batches = state_dict["total"], state_dict["batches"]
        self._resumed = bool(self._batches)
