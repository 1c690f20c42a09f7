"""Small modules that the checks train."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(LightningModule):
    """Classifier of 8 features in 4 classes; with dropout and batch norm, so that randomness and buffers take part.

    Args:
        width: Number of hidden units.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``(batch, 4)``, of inputs with 8 numbers each."""
        logits: Tensor = self.net(x.flatten(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross-entropy, and log it with the accuracy."""
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_acc", (logits.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum and weight decay, and a schedule that decays by epochs."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]
