"""Shared code of the scripts that kill runs: small federations on the digits, processes, and digests of results."""

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
from lightning.pytorch import Callback, LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `helpers`, the folder of the tests
from helpers.networks import MODULES
from lightning_sparsefl import algorithms
from lightning_sparsefl.data import Dirichlet, FederatedBlobs, FederatedDataModule, FederatedDigits
from lightning_sparsefl.errors import SparseFLError
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.federated.storage.memory_store import read_stored
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.models import MLP

NARROW: dict[str, dict[str, Any]] = {
    "FedP3": {"owned": 1},
    "PFedMe": {"lam": 5.0},
    "ScaleFL": {"widths": (0.5, 1.0)},
    "SplitMix": {"bases": 2},
}
"""Options for 16 hidden units and few layers, for which the default is too small, and for a learning rate of .1."""


def algorithm(name: str) -> FederatedAlgorithm:
    """Create a method with its default options."""
    made: FederatedAlgorithm = getattr(algorithms, name)(**NARROW.get(name, {}))
    return made


def epochs_of(method: FederatedAlgorithm) -> int:
    """Return the number of local epochs; SubFedAvg prunes by the masks of two, the others have one for speed."""
    return 2 if isinstance(method, algorithms.SubFedAvg) else 1


def without_finetuning(method: FederatedAlgorithm) -> FederatedAlgorithm:
    """Return the method without fine-tuning after the last round."""
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
        """Start the run in a folder, or resume the run that is there."""
        os.environ["PL_GLOBAL_SEED"] = str(self.seed)
        torch.manual_seed(self.seed)
        trainer = FederatedTrainer(
            algorithm=self.method,
            federation=Federation(**{"clients_per_round": 4, "pictures_every_n_rounds": 0, **self.federation}),
            accelerator="cpu",
            devices=1,
            max_rounds=self.rounds,
            max_epochs=epochs_of(self.method),
            default_root_dir=str(folder),
            client_callbacks=list(self.client_callbacks),
            callbacks=list(self.callbacks),
            enable_progress_bar=False,
        )
        module, data = self._parts()
        trainer.fit(module, data, "last" if list(folder.glob("*/version_*")) else None)

    def _parts(self) -> tuple[LightningModule, FederatedDataModule]:
        """Create the module and the data, of the contract tests for a method that needs more than a classifier."""
        sizes: dict[str, Any] = {"num_clients": 6, "examples_per_client": 40, "batch_size": 16, "val_fraction": 0.2}
        sizes |= {"partition": Dirichlet(alpha=1.0, min_examples=40), "test_per_client": 20}
        own = MODULES.get(type(self.method).__name__)
        if own is not None:
            return own(), FederatedBlobs(num_classes=4, dim=8, num_train=1200, num_test=400, **sizes)
        return MLP(num_classes=10, sample_shape=(1, 8, 8), hidden=(16,), momentum=0.9), FederatedDigits(**sizes)

    def folder(self, root: Path) -> Path:
        """Return the run folder below a root folder."""
        return root / type(self.method).__name__ / "version_0"


def start(work: Callable[[], None], log: Path) -> int:
    """Run a function in a forked process, which needs no imports.

    Args:
        work: Function to run; the exit code is 0, or 1 after an exception.
        log: File for standard output and error.

    Returns:
        Process id.
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
    """Wait for a process and return its exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def leaves(folder: Path) -> dict[str, str]:
    """Compute a digest of each result of a run, without times.

    Args:
        folder: Run folder.
    """
    checkpoints = folder / "checkpoints"
    content = load_checkpoint(checkpoints / "last.ckpt")
    own = content["sparsefl"]
    records = records_of(checkpoints, own)
    # the files of records are named by the rank that wrote them, and the identifier of a run is random
    kept = {name: value for name, value in own.items() if not name.endswith(" records") and name != "run"}
    found = {
        "checkpoint": fingerprint({**content, "sparsefl": kept}),
        "records": fingerprint(records),
        "summary.json": fingerprint(json.loads((folder / "summary.json").read_text())),
        "tensorboard": fingerprint(_scalars(folder)),
        "files": fingerprint(sorted(path.name for path in checkpoints.rglob("*"))),
    }
    for name in ("metrics.csv", "clients.csv", "finetuned.csv"):
        found[name] = _table(folder / name)
    return found


def records_of(folder: Path, own: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """Return what a run keeps about its clients: by store and client, the newest record.

    Args:
        folder: Folder of the checkpoints.
        own: The engine's part of the checkpoint.
    """
    found = {}
    for name, key in (("server", "server records"), ("nodes", "node records")):
        records = read_stored(StoredRecords(**own[key]), folder / "clients", name, own["run"])
        found[name] = {client: versions[max(versions)] for client, versions in sorted(records.items())}
    return found


def _scalars(folder: Path) -> dict[str, list[list[float]]]:
    """Read the steps and values of each TensorBoard tag."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [[point.step, point.value] for point in board.Scalars(tag)] for tag in tags}


def _table(path: Path) -> str:
    """Compute a digest of a table without its columns of times; empty if there is no table."""
    if not path.exists():
        return ""
    text = path.read_bytes()
    rows = list(csv.reader(text.decode().splitlines(keepends=True)))
    timed = {place for place, name in enumerate(rows[0]) if name.startswith("time/")}
    if not timed:
        return hashlib.sha256(text).hexdigest()
    return fingerprint([[cell for place, cell in enumerate(row) if place not in timed] for row in rows])


def environment() -> dict[str, str]:
    """Return the versions and the platform."""
    return {"python": sys.version.split()[0], "torch": torch.__version__, "platform": sys.platform}
