"""What the scripts that kill runs share: tiny federations on the digits, as processes, and what a run leaves."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  (once here, instead of once in every process)
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sparsefl import algorithms
from lightning_sparsefl.data import Dirichlet, FederatedDigits
from lightning_sparsefl.errors import SparseFLError
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.federated.storage.atomic_files import fingerprint
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.records import read_files
from lightning_sparsefl.models import MLP

NARROW: dict[str, dict[str, Any]] = {"SplitMix": {"bases": 2}}
"""Options for 16 hidden units, where a default leaves too little to learn with."""


def algorithm(name: str) -> FederatedAlgorithm:
    """A method at its defaults."""
    made: FederatedAlgorithm = getattr(algorithms, name)(**NARROW.get(name, {}))
    return made


def without_finetuning(method: FederatedAlgorithm) -> FederatedAlgorithm:
    """A method whose clients are not fine-tuned after the last round."""
    names = {option.name for option in fields(method)}  # type: ignore[arg-type]
    return replace(method, finetune_epochs=0) if "finetune_epochs" in names else method  # type: ignore[type-var]


@dataclass(frozen=True)
class Run:
    """A federation of six clients with 40 images each."""

    method: FederatedAlgorithm
    rounds: int
    seed: int = 0
    federation: dict[str, Any] = field(default_factory=dict)
    client_callbacks: Sequence[Callback] = ()
    callbacks: Sequence[Callback] = ()

    def fit(self, folder: Path) -> None:
        """Start the run in a folder, or go on with the one that is there."""
        os.environ["PL_GLOBAL_SEED"] = str(self.seed)
        torch.manual_seed(self.seed)
        trainer = FederatedTrainer(
            algorithm=self.method,
            federation=Federation(**{"clients_per_round": 4, "pictures_every_n_rounds": 0, **self.federation}),
            accelerator="cpu",
            devices=1,
            max_rounds=self.rounds,
            max_epochs=1,
            default_root_dir=str(folder),
            client_callbacks=list(self.client_callbacks),
            callbacks=list(self.callbacks),
            enable_progress_bar=False,
        )
        data = FederatedDigits(
            num_clients=6,
            partition=Dirichlet(alpha=1.0, min_examples=40),
            examples_per_client=40,
            batch_size=16,
            val_fraction=0.2,
            test_per_client=20,
        )
        module = MLP(num_classes=10, sample_shape=(1, 8, 8), hidden=(16,), momentum=0.9)
        trainer.fit(module, data, "last" if list(folder.glob("*/version_*")) else None)

    def folder(self, root: Path) -> Path:
        """The run's folder, where there is one."""
        return root / type(self.method).__name__ / "version_0"


def start(work: Callable[[], None], log: Path) -> int:
    """Do some work in a process of its own, which starts at once, since everything is imported.

    Args:
        work: What it does; it leaves with 0, or with 1 after an exception.
        log: Where it writes what it says.

    Returns:
        Its number.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        work()
        code = 0
    except SparseFLError as error:
        print(error, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(process: int) -> int:
    """Wait until a process has ended; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def leaves(folder: Path) -> dict[str, str]:
    """What a run leaves, each part as a digest of all it says but times.

    Args:
        folder: Of the run.
    """
    checkpoints = folder / "checkpoints"
    content = load_checkpoint(checkpoints / "last.ckpt")
    clients = content["sparsefl"]["clients"]
    found = {
        "checkpoint": fingerprint(content),
        "records": fingerprint(_records(checkpoints / "clients", clients["index"], clients["checksums"])),
        "summary.json": fingerprint(json.loads((folder / "summary.json").read_text())),
        "tensorboard": fingerprint(_scalars(folder)),
        "files": fingerprint(sorted(path.name for path in checkpoints.rglob("*"))),
    }
    for name in ("metrics.csv", "clients.csv", "finetuned.csv"):
        found[name] = _table(folder / name)
    return found


def _records(folder: Path, index: Any, checksums: dict[int, str]) -> dict[int, Any]:
    """The clients' records that a checkpoint names, in files of rounds or, with `federation.store: disk`, in one."""
    if isinstance(index, dict):
        return read_files(index, folder, checksums)
    file = RecordDatabase.at(folder, index)
    return {client: file.read(client, index) for client in file.clients(index)}


def _scalars(folder: Path) -> dict[str, list[list[float]]]:
    """Steps and values of every tag in TensorBoard, as it shows them."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [[point.step, point.value] for point in board.Scalars(tag)] for tag in tags}


def _table(path: Path) -> str:
    """A digest of a table's text, byte by byte, without its columns of times; empty if there is none."""
    if not path.exists():
        return ""
    text = path.read_bytes()
    rows = list(csv.reader(text.decode().splitlines(keepends=True)))
    timed = {place for place, name in enumerate(rows[0]) if name.startswith("time/")}
    if not timed:
        return hashlib.sha256(text).hexdigest()
    return fingerprint([[cell for place, cell in enumerate(row) if place not in timed] for row in rows])


def environment() -> dict[str, str]:
    """What the result was made with."""
    return {"python": sys.version.split()[0], "torch": torch.__version__, "platform": sys.platform}
