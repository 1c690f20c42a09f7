"""Check of a client's deadline between batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.federated.exchange.deadline import Deadline


class CheckDeadline(Callback):
    """Callback that checks a client's deadline before every batch.

    Args:
        deadline: Deadline of the client's round.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the deadline before a training batch, after the loader has yielded it."""
        self._deadline.check()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check the deadline before a batch of the validation within the fit."""
        self._deadline.check()
