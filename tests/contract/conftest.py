"""A small federation that every contract runs."""

import os

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated.storage.records import MemoryStore
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore

LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "GLOBAL_RANK")


class Net(L.LightningModule):
    """A user's module: dropout and batch norm, so that randomness and buffers take part."""

    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)
        )

    def forward(self, x):
        return self.net(x.flatten(1))

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_acc", (logits.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@pytest.fixture
def federation(tmp_path):
    """Runs the small federation; returns the trainer and the checkpoint's content."""

    def run(algorithm, *, devices=1, rounds=3, folder="run", module=None, ckpt_path=None, verb="fit", **options):
        arguments = options.pop("arguments", {})  # of the verb
        federation = Federation(clients_per_round=4, **options.pop("federation", {}))
        data = FederatedBlobs(
            num_train=options.pop("num_train", 300),
            num_test=100,
            num_clients=6,
            num_classes=4,
            dim=8,
            partition=Dirichlet(alpha=1.0, min_examples=12),
            val_fraction=0.2,
            batch_size=8,
            drop_last=True,  # batch norm cannot train on one sample
            **options.pop("data", {}),
        )
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            algorithm=algorithm,
            federation=federation,
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=rounds,
            max_epochs=options.pop("max_epochs", 2),
            logger=options.pop("logger", False),
            enable_progress_bar=False,
            default_root_dir=str(tmp_path / folder),
            timeout=120,
            **options,
        )
        before = dict(os.environ)
        try:
            summary = getattr(trainer, verb)(module or Net(), data, ckpt_path, **arguments)
        finally:
            for name in LAUNCHER:  # a launcher leaves these behind, and the next one stumbles over them
                if name not in before:
                    os.environ.pop(name, None)
        trainer.summary = summary
        return trainer

    run.module = Net
    return run


@pytest.fixture
def last():
    """The content of a trainer's last checkpoint, clients' records included, in comparable form."""

    def read(trainer):
        folder = trainer.run_folder / "checkpoints"
        content = torch.load(folder / "last.ckpt", weights_only=True)
        clients = content["sparsefl"].pop("clients")
        del content["sparsefl"]["checksum"]  # of another index where records lie elsewhere
        store = (SqliteStore if isinstance(clients["index"], int) else MemoryStore)(torch.device("cpu"))
        store.load(clients["index"], folder / "clients", {}, clients["checksums"])
        content["records"] = dict(sorted(store.records().items()))
        return comparable(content)

    return read


def comparable(value):
    """Tensors as bytes, so that == compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value
