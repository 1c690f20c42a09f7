"""A run as its YAML describes it: the same file that `sparsefl fit --config` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning_sparsefl.cli.program import parse
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import FederatedTrainer
from lightning_sparsefl.federated.commands.inputs import as_client_data


@dataclass(frozen=True)
class Configured:
    """The objects of a configuration."""

    trainer: FederatedTrainer
    module: LightningModule
    data: Any
    """Data module of the clients."""
    ckpt_path: str | None
    """Checkpoint that the configuration names."""


def read(config: str, arguments: Sequence[str] = ()) -> Configured:
    """Create the objects of a YAML file.

    Args:
        config: Path of the file, or a name that `sparsefl configs` lists.
        arguments: Options of `sparsefl fit` that take precedence over the file.

    Raises:
        InvalidOption: If an option is not valid, or the run is one of several processes.
    """
    if not config:
        raise InvalidOption("`config` is empty; expected the YAML of the run, as `sparsefl fit --config` reads it.")
    cli = parse(["--config", config, *arguments])
    trainer: Any = cli.trainer
    if trainer.fabric.world_size != 1:
        raise InvalidOption(
            f"`trainer.devices`, `trainer.num_nodes` and `federation.workers_per_device` ask for "
            f"{trainer.fabric.world_size} processes; expected 1 on the server and on each node of a deployment."
        )
    return Configured(trainer, cli.model, as_client_data(cli.datamodule), cli.config["fit"]["ckpt_path"])
