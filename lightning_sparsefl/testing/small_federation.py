"""A small federation, whose runs take about a second."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.testing.networks import Classifier

LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "GLOBAL_RANK")
"""Variables that a launcher of ranks leaves in the environment, which would mislead the next one."""


class SmallFederation:
    """Federation of 6 clients with blobs of 8 features in 4 classes, of which 4 train in each round.

    Args:
        folder: Folder of the run folders.
        module_for: Function that makes the module that a method trains.
        accelerator: Accelerator of the trainer.
        federation: Options of the federation in all runs.
    """

    module = Classifier

    def __init__(
        self,
        folder: Path,
        module_for: Callable[[FederatedAlgorithm], LightningModule] | None = None,
        accelerator: str = "cpu",
        federation: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.accelerator, self.federation = folder, accelerator, dict(federation or {})
        self.module_for = module_for or (lambda algorithm: Classifier())

    def __call__(
        self,
        algorithm: FederatedAlgorithm,
        *,
        devices: int = 1,
        rounds: int = 3,
        folder: str = "run",
        module: LightningModule | None = None,
        ckpt_path: str | None = None,
        verb: str = "fit",
        **options: Any,
    ) -> Any:
        """Run a verb of the trainer; return the trainer, with the result of the verb as `summary`.

        Args:
            algorithm: Method to run.
            devices: Number of ranks, which are forked.
            rounds: Number of rounds.
            folder: Name of the folder for the run folders.
            module: Module. Default: a new one.
            ckpt_path: Checkpoint to start from.
            verb: Name of a method of the trainer.
            options: Arguments of the trainer; also `federation`, `data` and `arguments` (of the verb), as mappings, and
                `num_train`, the number of training examples.
        """
        arguments = options.pop("arguments", {})
        asked = copy.deepcopy(self.federation | dict(options.pop("federation", {})))  # no run keeps a state in them
        federation = Federation(**{"clients_per_round": 4, **asked})
        data = _blobs(options.pop("num_train", 300), **options.pop("data", {}))
        torch.manual_seed(0)
        trainer: Any = FederatedTrainer(
            algorithm=algorithm,
            federation=federation,
            accelerator=self.accelerator,
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=rounds,
            max_epochs=options.pop("max_epochs", 2),
            logger=options.pop("logger", False),
            enable_progress_bar=False,
            default_root_dir=str(self.folder / folder),
            timeout=120,
            **options,
        )
        before = dict(os.environ)
        try:
            trainer.summary = getattr(trainer, verb)(module or self.module_for(algorithm), data, ckpt_path, **arguments)
        finally:
            for name in LAUNCHER:
                if name not in before:
                    os.environ.pop(name, None)
        return trainer


def _blobs(num_train: int, **options: Any) -> FederatedBlobs:
    return FederatedBlobs(
        num_train=num_train,
        num_test=100,
        num_clients=6,
        num_classes=4,
        dim=8,
        partition=Dirichlet(alpha=1.0, min_examples=12),
        val_fraction=0.2,
        batch_size=8,
        drop_last=True,  # batch norm cannot train on one sample
        **options,
    )
