"""The loss of the first batch of a fit."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule


class FirstLoss(Callback):
    """Stores the loss of the first batch of a fit, which is that of the weights before any step."""

    stackable = True

    def __init__(self) -> None:
        self.loss: float | None = None
        """The loss; None before the first batch, and of a module that optimizes manually."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the loss."""
        if self.loss is None and isinstance(outputs, dict) and "loss" in outputs:
            # Lightning divides the loss by the number of batches whose gradients are accumulated
            self.loss = float(outputs["loss"]) * int(trainer.accumulate_grad_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss."""
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss of a checkpoint."""
        self.loss = state_dict["loss"]
