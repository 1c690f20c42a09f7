"""A small fit in a plain Trainer or in a client, with callbacks to check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.federated.distributed.fabric import build_fabric
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions

BATCHES, EPOCHS = 7, 4
"""Numbers of batches of an epoch, and of epochs of a fit."""


def momentum(parameters: Any) -> SGD:
    """Return SGD with momentum and weight decay, which move weights whose gradient is zero."""
    return SGD(parameters, 0.2, momentum=0.9, weight_decay=0.01)


class Net(LightningModule):
    """Classifier of 5 features in 3 classes, with the buffers of a batch norm.

    Args:
        optimizer: Function of the parameters that makes the optimizer.
        dropout: Probability of dropout.
        seed: Seed of the first weights.
        width: Number of units of the second hidden layer.
    """

    def __init__(self, optimizer: Any = momentum, dropout: float = 0.0, seed: int = 1, width: int = 6) -> None:
        super().__init__()
        self.optimizer = optimizer
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(5, 8),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(8, width),
                nn.Linear(width, 3),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, ``(batch, 3)``."""
        logits: Tensor = self.net(inputs)
        return logits

    def training_step(self, batch: Any) -> Tensor:
        """Return and log the loss."""
        return self._loss("loss", batch)

    def validation_step(self, batch: Any) -> None:
        """Log the loss."""
        self._loss("val_loss", batch)

    def test_step(self, batch: Any) -> None:
        """Log the loss."""
        self._loss("test_loss", batch)

    def predict_step(self, batch: Any) -> Tensor:
        """Return logits."""
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.optimizer(self.parameters())

    def _loss(self, name: str, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(name, loss)
        return loss


def loader(shuffle: bool = False, alike: bool = False) -> DataLoader[Any]:
    """Return batches of 4 samples, whose class is the largest of three features.

    Args:
        shuffle: Whether to shuffle in every epoch, from torch's global generator.
        alike: Whether all batches are the same.
    """
    x = torch.randn(4 * BATCHES, 5, generator=torch.Generator().manual_seed(0))
    x = x[:4].repeat(BATCHES, 1) if alike else x
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


def no_companions(callback: Callback) -> Sequence[Callback]:
    """Return no further callbacks."""
    return ()


@dataclass(frozen=True)
class SmallFit:
    """What a check fits a module with."""

    folder: Path
    """Folder of checkpoints."""
    module: Callable[..., LightningModule] = Net
    """Function of the keyword `seed` that makes the module, for batches of ``(4, 5)`` features and classes 0 to 2."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the Trainer."""
    companions: Callable[[Callback], Sequence[Callback]] = no_companions
    """Function of the callback that makes others, which stand behind it."""

    def attach(self, callback: Callback) -> list[Any]:
        """Return a new copy of a callback and its companions."""
        copied = copy.deepcopy(callback)
        return [copied, *self.companions(copied)]

    def trainer(self, callbacks: Sequence[Callback], **options: Any) -> Trainer:
        """Return a Trainer on the CPU that prints nothing."""
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        given = {"max_epochs": EPOCHS, "default_root_dir": self.folder, "enable_checkpointing": saves, "devices": 1}
        return Trainer(callbacks=list(callbacks), **{**given, **quiet, **self.options, **options})

    def fit(self, module: LightningModule, callbacks: Sequence[Callback], **options: Any) -> Trainer:
        """Fit a module in a Trainer, and return the Trainer."""
        trainer = self.trainer(callbacks, num_sanity_val_steps=0, **options)
        trainer.fit(module, loader(), loader())
        return trainer

    def fit_in_a_client(self, module: LightningModule, callbacks: Sequence[Callback], data: Any) -> Mapping[str, Any]:
        """Fit a module as a client of a federation does, and return its metrics."""
        rest = dict(self.options)
        fabric = build_fabric(
            accelerator="cpu",
            devices=1,
            num_nodes=1,
            strategy="auto",
            precision=rest.pop("precision", "32-true"),
            timeout=60.0,
        )
        engine = FastEngine(fabric, LocalOptions(max_epochs=EPOCHS, **rest))
        return engine.fit(module, data, loader(), callbacks=callbacks)
