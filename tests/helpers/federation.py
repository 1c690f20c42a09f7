"""A small federation, and what its runs leave in a form that can be compared; the fixtures are in tests/conftest.py."""

from __future__ import annotations

import os

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, FederatedBlobs

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
def last(stored_records):
    """Read the content of a trainer's last checkpoint, clients' newest records included, in comparable form."""

    def read(trainer):
        folder = trainer.run_folder / "checkpoints"
        content = torch.load(folder / "last.ckpt", weights_only=True)
        # another index where records lie elsewhere, and another identifier
        for part in ("server records", "node records", "checksum", "run"):
            del content["sparsefl"][part]
        del content["sparsefl"]["identity"]["training"]["wire"]
        stores = stored_records(trainer.run_folder)
        content["records"] = {
            name: {client: versions[max(versions)] for client, versions in sorted(records.items())}
            for name, records in stores.items()
        }
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


def without_masks(content):
    """Without the masks that a node keeps to decode messages against, and the versions of records with nothing else."""
    records = content["records"]
    for record in records["server"].values():
        del record["version"]
    nodes = {client: (record["memory"], record["buffers"]) for client, record in records["nodes"].items()}
    records["nodes"] = {client: kept for client, kept in nodes.items() if any(kept)}
    return content
