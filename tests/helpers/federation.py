"""A small federation, and what its runs leave in a form that can be compared; the fixtures are in tests/conftest.py."""

from __future__ import annotations

import os

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated.storage.records import MemoryStore
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore

LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "GLOBAL_RANK")


@pytest.fixture
def federation(tmp_path):
    """Run a verb of the trainer on a small federation; return the trainer, with the result as `summary`."""

    def run(algorithm, *, devices=1, rounds=3, folder="run", module=None, ckpt_path=None, verb="fit", **options):
        arguments = options.pop("arguments", {})
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
            summary = getattr(trainer, verb)(module or Classifier(), data, ckpt_path, **arguments)
        finally:
            for name in LAUNCHER:  # a launcher leaves these behind, and the next one stumbles over them
                if name not in before:
                    os.environ.pop(name, None)
        trainer.summary = summary
        return trainer

    run.module = Classifier
    return run


@pytest.fixture
def last():
    """Read the content of a trainer's last checkpoint, clients' records included, in comparable form."""

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
