"""Comparison of all ways of starting ranks: every algorithm, on 1 to 4 processes, with static and dynamic placement.

Each launch runs all its cases one after another in the same processes. The server, the client records, the ledger, the
tables (without times) and the final table are compared with those of one rank. Nothing is timed.

    python tests/stress/ranks.py --out result.json
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `helpers`, the folder of the tests
sys.path.insert(0, str(Path(__file__).parent))  # as when it is run as a script
from _federations import algorithm, epochs_of, records_of

from helpers.networks import MODULES
from lightning_sparsefl import algorithms
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.types import Update

CLUSTER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "GLOBAL_RANK")
PLACEMENTS = ("static", "dynamic")


@dataclass(frozen=True, kw_only=True)
class Drift(FederatedAlgorithm):
    """FedAvg whose clients also send their changes in `extra`, scaled to different magnitudes, to test exact sums."""

    def train(self, message: Any, client: Any) -> Update:
        """Train as FedAvg, and add two entries to `extra`, one of them for some clients only."""
        update = super().train(message, client)
        moved = {name: weight - message.weights[name] for name, weight in update.weights.items()}
        tiny = {name: tensor * 2.0 ** -(40 * (client.id % 3)) for name, tensor in moved.items()}
        return replace(update, extra={"moved": tiny, **({"rare": moved} if client.id % 2 else {})})

    def aggregate(self, server: Any, merged: Any) -> Any:
        """Aggregate as FedAvg, and add the merged `extra` to the weights."""
        state = super().aggregate(server, merged)
        drift = merged.extra["moved"]
        weights = {name: weight + 0.01 * drift[name] for name, weight in state.weights.items()}
        return replace(state, weights=weights, extra={"drift": drift, **merged.extra})


CASES: dict[str, FederatedAlgorithm] = {
    **{name: algorithm(name) for name in algorithms.__all__},
    "FedSpa static": algorithms.FedSpa(search="static", mask_init="different", layer_density="uniform", density=0.3),
    "FedSpa count": algorithms.FedSpa(mask_init="different", growth="random", merge="count", mask_pool="all"),
    "FedLPS fixed": algorithms.FedLPS(ratio="fixed", refresh="round", reduction="mean"),
    "FedLPS rolling": algorithms.FedLPS(ratio="capacity", pattern="rolling", dynamic=True, mu=0.1),
    "FedDIP dense": algorithms.FedDIP(density=0.3, initial_density=1.0, reconfigure_every=1, penalty=0.01, mu=0.1),
    "HeteroFL labels": algorithms.HeteroFL(rates=(0.5,), label_mask=True),
    "PerFedMask HeteroFL": algorithms.PerFedMask(base=algorithms.HeteroFL(rates=(0.5,))),
    "PerFedMask SplitMix": algorithms.PerFedMask(base=algorithms.SplitMix(bases=2)),
    "extra trees": Drift(),
}


@dataclass(frozen=True)
class Launch:
    """A way of starting ranks."""

    how: str
    """``fork``, ``popen``, ``torchrun`` or ``slurm``."""
    nodes: int = 1
    per_node: int = 1
    workers: int = 1
    """Number of ranks on each device, out of `per_node`."""


LAUNCHES = {
    "fork 2": Launch("fork", per_node=2),
    "fork 3": Launch("fork", per_node=3),
    "fork, 2 workers on a device": Launch("fork", per_node=2, workers=2),
    "popen 2": Launch("popen", per_node=2),
    "popen 3": Launch("popen", per_node=3),
    "torchrun 1": Launch("torchrun"),
    "torchrun 2": Launch("torchrun", per_node=2),
    "torchrun 3": Launch("torchrun", per_node=3),
    "torchrun, 2 workers on a device": Launch("torchrun", per_node=2, workers=2),
    "torchrun, 2 nodes of 1": Launch("torchrun", nodes=2),
    "torchrun, 2 nodes of 2": Launch("torchrun", nodes=2, per_node=2),
    "slurm, 2 nodes of 1": Launch("slurm", nodes=2),
    "slurm, 1 node of 2": Launch("slurm", per_node=2),
}


class Net(L.LightningModule):
    """Module with dropout and batch norm, to include randomness and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        return self.net(x.flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean cross-entropy of a batch, and log it with the accuracy."""
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_acc", (logits.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def fit(case: str, placement: Any, rounds: int, folder: Path, **options: Any) -> dict[str, str] | None:
    """Run a federation; return the fingerprints of its results on rank 0, and None on the others."""
    workers = options.pop("workers", 1)
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        algorithm=CASES[case],
        federation=Federation(clients_per_round=4, placement=placement, workers_per_device=workers, unseen_clients=1),
        accelerator="cpu",
        max_rounds=rounds,
        max_epochs=epochs_of(CASES[case]),
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        timeout=300,
        seed=0,
        **options,
    )
    data = FederatedBlobs(
        num_clients=7,
        dim=8,
        num_train=300,
        num_test=40,
        partition=Dirichlet(alpha=1.0, min_examples=12),
        val_fraction=0.2,
        batch_size=8,
        drop_last=True,  # batch norm cannot train on one sample
    )
    summary = trainer.fit(MODULES.get(case, Net)(), data)
    return left_by(trainer.run_folder, summary) if trainer.fabric.global_rank == 0 else None


def left_by(folder: Path, summary: Mapping[str, Any]) -> dict[str, str]:
    """Compute a fingerprint of each result of a run."""
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    own = content["sparsefl"]
    things = {
        "weights": content["state_dict"],
        "state": own["state"],
        "ledger": own["ledger"],
        "records": records_of(folder / "checkpoints", own),
        "summary": dict(summary),
        **{table: rows(folder / table) for table in ("metrics.csv", "clients.csv", "finetuned.csv")},
    }
    return {name: hashlib.sha256(repr(plain(thing)).encode()).hexdigest()[:16] for name, thing in things.items()}


def plain(value: Any) -> Any:
    """Convert a value to plain types, with tensors as bytes and mappings as sorted lists."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, Mapping):
        return [(key, plain(value[key])) for key in sorted(value, key=str)]
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def rows(path: Path) -> list[dict[str, str]]:
    """Read a table without its times; empty if there is no table."""
    if not path.exists():
        return []
    with path.open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def work(arguments: Sequence[str]) -> None:
    """Run the cases of a launch in this process, which is started instead of ``sparsefl``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--trainer.num_nodes", dest="num_nodes", type=int, default=1)
    parser.add_argument("--trainer.devices", dest="devices", default="auto")
    known, _ = parser.parse_known_args(arguments)
    job = json.loads(known.work.read_text())
    devices = known.devices if known.devices == "auto" else int(known.devices)
    found = {}
    for case, placement in job["runs"]:
        folder = known.work.parent / f"{case} {placement}"
        left = fit(
            case, placement, job["rounds"], folder, devices=devices, num_nodes=known.num_nodes, workers=job["workers"]
        )
        found[f"{case} {placement}"] = left
    if all(found.values()):
        known.work.with_suffix(".found").write_text(json.dumps(found))


@contextmanager
def clean_environment() -> Iterator[None]:
    """Remove the environment variables that a launcher has set, which would affect the next one."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in LAUNCHER:
            if name not in before:
                os.environ.pop(name, None)


def forked(launch: Launch, runs: Sequence[Sequence[str]], rounds: int, folder: Path) -> dict[str, Any]:
    """Run each case in forked processes of its own."""
    found, ranks = {}, launch.per_node
    for case, placement in runs:
        with clean_environment():
            found[f"{case} {placement}"] = fit(
                case,
                placement,
                rounds,
                folder / f"{case} {placement}",
                devices=ranks // launch.workers,
                workers=launch.workers,
                strategy="client_parallel_fork" if ranks > 1 else "auto",
            )
    return found


SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
command = [argument for argument in sys.argv[1:] if argument != "--kill-on-bad-exit=1"]
tasks = [{"SLURM_PROCID": n * per_node + t, "SLURM_NODEID": n, "SLURM_LOCALID": t}
         for n in range(nodes) for t in range(per_node)]
running = [subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in task.items()}}) for task in tasks]
sys.exit(max(abs(process.wait()) for process in running))
"""
"""SLURM's `srun`, on this machine."""


def commands(launch: Launch, folder: Path, port: int) -> tuple[list[list[str]], dict[str, str]]:
    """Return the commands of a launch and their environment, in which `sparsefl` runs :func:`work`."""
    shim, own = folder / "sparsefl", [str(Path(__file__).resolve())]
    shim.write_text(f"#!{sys.executable}\nimport runpy, sys\nrunpy.run_path({own[0]!r}, run_name='__main__')\n")
    (folder / "srun").write_text(SRUN)
    for path in (shim, folder / "srun"):
        path.chmod(0o755)
    arguments = ["--work", str(folder / "job.json")]
    environment = {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    if launch.how == "popen":
        devices = launch.per_node // launch.workers
        return [[sys.executable, str(shim), "fit", *arguments, "--trainer.devices", str(devices)]], environment
    if launch.how == "torchrun":
        environment |= {"NODES": str(launch.nodes), "RANKS": str(launch.per_node), "HEAD": f"localhost:{port}"}
        return [[str(CLUSTER / "torchrun.sh"), *arguments]] * launch.nodes, environment
    tasks = {"SLURM_NNODES": launch.nodes, "SLURM_NTASKS_PER_NODE": launch.per_node}
    tasks |= {"SLURM_NTASKS": launch.nodes * launch.per_node, "SLURM_JOB_ID": port, "MASTER_PORT": port}
    names = {"SLURM_JOB_NAME": "sparsefl", "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
    script = [str(CLUSTER / "slurm.sh"), *arguments]
    return [script], environment | names | {name: str(number) for name, number in tasks.items()}


def started(launch: Launch, runs: Sequence[Sequence[str]], rounds: int, folder: Path, port: int) -> dict[str, Any]:
    """Run all cases in the processes of one launch."""
    job = folder / "job.json"
    job.write_text(json.dumps({"runs": runs, "rounds": rounds, "workers": launch.workers}))
    lines, environment = commands(launch, folder, port)
    outside = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    running = [
        subprocess.Popen(
            line,
            cwd=folder,
            env={**outside, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    ]
    readers = [_Reader(process) for process in running]
    outputs = [reader.finish() for reader in readers]
    if any(process.returncode for process in running):
        sys.exit(f"{launch} failed:\n" + "\n".join(output[-4000:] for output in outputs))
    found: dict[str, Any] = json.loads(job.with_suffix(".found").read_text())
    return found


class _Reader(threading.Thread):
    """Thread that reads the output of a process, which would block if its pipe were full."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self.process, self.output = process, ""
        self.start()

    def run(self) -> None:
        self.output, _ = self.process.communicate()

    def finish(self) -> str:
        self.join()
        return self.output


def free_port() -> int:
    """Return an unused port."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def compare(plan: Mapping[str, Sequence[Sequence[str]]], rounds: int) -> Iterator[dict[str, Any]]:
    """Run one rank and then all launches, and yield the report after each launch.

    Args:
        plan: Cases and placements by name of the launch.
        rounds: Number of rounds of each federation.
    """
    cases = sorted({case for runs in plan.values() for case, _ in runs}, key=list(CASES).index)
    with tempfile.TemporaryDirectory() as folder:
        one = forked(Launch("fork"), [(case, "static") for case in cases], rounds, Path(folder))
    launches: dict[str, Any] = {}
    for name, runs in plan.items():
        with tempfile.TemporaryDirectory() as folder:
            launch, place = LAUNCHES[name], Path(folder)
            alone = launch.how == "fork"
            found = forked(launch, runs, rounds, place) if alone else started(launch, runs, rounds, place, free_port())
        differences = [
            f"{case}, {placement}: {part}"
            for case, placement in runs
            for part, mark in found[f"{case} {placement}"].items()
            if mark != one[f"{case} static"][part]
        ]
        launches[name] = {"ranks": launch.nodes * launch.per_node, "runs": len(runs), "differences": differences}
        yield {
            "runs": sum(launch["runs"] for launch in launches.values()),
            "differences": sum(len(launch["differences"]) for launch in launches.values()),
            "compared": list(one[f"{cases[0]} static"]),
            "launches": launches,
            "one rank": {case: one[f"{case} static"] for case in cases},
        }


def main() -> None:
    """Compare, print JSON, and write it to `--out`."""
    if sys.argv[1:2] == ["fit"]:
        work(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES), help="ways to start ranks")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to train")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of each federation")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    runs = list(itertools.product(arguments.cases, PLACEMENTS))
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "rounds": arguments.rounds,
    }
    for found in compare(dict.fromkeys(arguments.launches, runs), arguments.rounds):
        result |= found
        if arguments.out is not None:  # after each launch, since all of them take long
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["differences"] else 0)


if __name__ == "__main__":
    main()
