"""A deployment in one process, and the simulation that it must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from flwr.supercore.task_identity import TaskIdentity
from lightning_sparsefl.cli import main

from helpers.memory_grid import MemoryGrid
from lightning_sparsefl_flower.configuration import read
from lightning_sparsefl_flower.daemon import Daemon
from lightning_sparsefl_flower.node_command import make_daemon
from lightning_sparsefl_flower.server import ServerOptions, fit

HOMES = ((0, 3), (1, 4), (2, 5))
"""Clients of each node."""


def configuration(path: Path, algorithm: dict[str, Any], **changed: Any) -> Path:
    """Write the YAML of a small federation; `changed` replaces options of its groups."""
    content: dict[str, Any] = {
        "seed_everything": 42,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_rounds": 3,
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
        },
        "algorithm": algorithm,
        "federation": {"clients_per_round": 4, "local_engine": "fast", "wire": "encode"},
        "model": {"class_path": "MLP", "init_args": {"hidden": [16]}},
        "data": {
            "class_path": "FederatedBlobs",
            "init_args": {
                "num_clients": 6,
                "num_classes": 4,
                "num_train": 240,
                "num_test": 60,
                "batch_size": 16,
                "val_fraction": 0.2,
                "eval_split": "test",
            },
        },
    }
    for group, options in changed.items():
        content[group] = {**content[group], **options}
    path.write_text(yaml.safe_dump(content))
    return path


class Deployment:
    """Three nodes with two clients each.

    Args:
        config: YAML of the run.
        folder: Folder of nodes and run folders.
    """

    def __init__(self, config: Path, folder: Path) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.config, self.folder, self.grid = config, folder, MemoryGrid()
        self.daemons = [self.daemon(place) for place in range(len(HOMES))]
        self.numbers = [
            self.grid.add(lambda request, place=place: self.daemons[place].answer(request))
            for place in range(len(HOMES))
        ]

    def daemon(self, place: int, config: Path | None = None) -> Daemon:
        """Start a daemon, or start it again."""
        home = self.folder / f"node-{place}"
        configured = read(str(config or self.config), ["--trainer.default_root_dir", str(home)])
        return make_daemon(configured, HOMES[place], home, configured.trainer.fabric)

    def fit(self, **options: Any) -> Path:
        """Run the server; return the run folder."""
        given = {"holdout": True, "poll": 0.02, "timeout": 5.0, "root": str(self.folder / "runs"), **options}
        done = fit(self.grid, ServerOptions(**{"config": str(self.config), **given}))
        assert done.folder is not None
        return done.folder


def simulated(config: Path, root: Path) -> Path:
    """Run `sparsefl fit`; return the run folder."""
    assert main(["fit", "--config", str(config), "--trainer.default_root_dir", str(root)]) == 0
    (folder,) = root.glob("*/version_0")
    return folder
