"""Random federations with two local engines: a real Trainer for each client, and the engine that `auto` chooses.

Each case is drawn from its number: a method, a module with its loss, hooks, logged values and kept state, an optimizer
with a schedule, data, and options. Both engines train it for three rounds in double precision. Final weights, clients'
records and tables must agree up to rounding; where one engine refuses a case, the other must do so too.

    python tests/stress/engines.py --minutes 30 --out result.json
    python tests/stress/engines.py --cases 17 --show
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import math
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from _federations import environment, records_of
from _modules import CLASSES, Draws, module_of
from torch import Tensor, nn

from helpers.algorithms import VARIANTS
from helpers.networks import MODULES
from lightning_sparsefl import callbacks
from lightning_sparsefl.data import IID, Dirichlet, FederatedBlobs, FederatedDataModule
from lightning_sparsefl.errors import SparseFLError
from lightning_sparsefl.federated import (
    CoverageMedian,
    FederatedAlgorithm,
    FederatedTrainer,
    Federation,
    ServerOptimizer,
    TrimmedMean,
)
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.testing.contents import rows

CLIENTS = 6
TOLERANCE = 1e-9
"""Largest difference of two numbers, relative to the larger one where that is above 1."""
ENGINES = ("trainer", "auto")

CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "ActivationPruning": lambda: callbacks.ActivationPruning(density=0.5),
    "BudgetAwareExtrusion": lambda: callbacks.BudgetAwareExtrusion(),
    "DynamicMask": lambda: callbacks.DynamicMask(density=0.5, every_n_steps=3),
    "DynamicMask, random": lambda: callbacks.DynamicMask(density=0.5, every_n_steps=2, growth="random"),
    "DynamicPruningWithFeedback": lambda: callbacks.DynamicPruningWithFeedback(density=0.5, every_n_steps=3),
    "GlobalMagnitudePruning": lambda: callbacks.GlobalMagnitudePruning(),
    "GradualPruning": lambda: callbacks.GradualPruning(density=0.5, every_n_steps=2),
    "GroupPenalty": lambda: callbacks.GroupPenalty(strength=0.01),
    "GroupPenalty, units": lambda: callbacks.GroupPenalty(strength=0.01, groups="units"),
    "LearnedImportance": lambda: callbacks.LearnedImportance(),
    "LossSquares": lambda: callbacks.LossSquares(),
    "LotteryRewind": lambda: callbacks.LotteryRewind(density=0.5, cycles=2),
    "MoreauEnvelope": lambda: callbacks.MoreauEnvelope(strength=2.0, lr=0.05, steps=2),
    "NMPruning": lambda: callbacks.NMPruning(),
    "OrderedDropout": lambda: callbacks.OrderedDropout(rates=(0.5, 1.0)),
    "PowerPropagation": lambda: callbacks.PowerPropagation(),
    "ProximalTerm": lambda: callbacks.ProximalTerm(strength=0.1),
    "SparsityMonitor": lambda: callbacks.SparsityMonitor(flops=False),
    "StaticMask": lambda: callbacks.StaticMask(),
}
"""The package's callbacks, as a user gives them to the clients."""
PLAIN = [variant for variant in VARIANTS if type(variant).__name__ in ("FedAvg", "FedPer", "FedOpt", "FedDyn", "Ditto")]
"""Methods that leave room for callbacks that mask."""


@dataclass(frozen=True)
class Case:
    """A federation that is drawn from its number."""

    method: FederatedAlgorithm
    draws: Draws | None
    callbacks: tuple[str, ...]
    federation: dict[str, Any]
    trainer: dict[str, Any]
    data: dict[str, Any]

    @classmethod
    def of(cls, number: int) -> Case:
        """Draw a case."""
        rng = random.Random(number)
        names = rng.sample(sorted(CALLBACKS), rng.choice([1, 1, 2])) if rng.random() < 0.3 else []
        method = rng.choice(PLAIN if names and rng.random() < 0.8 else VARIANTS)
        own = type(method).__name__ in MODULES
        plain = rng.random() < 0.75
        return cls(
            method=method,
            draws=None if own else Draws.of(rng, plain),
            callbacks=tuple(names),
            federation=_federation(rng),
            trainer=_trainer(rng),
            data=_data(rng),
        )

    def run(self, engine: str, folder: Path) -> tuple[dict[str, Any], bool]:
        """Run the federation; return what is compared, and whether clients were trained in stacks."""
        torch.manual_seed(0)
        name = type(self.method).__name__
        module = MODULES[name]() if self.draws is None else module_of(self.draws)
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # clients of a stack draw other random numbers
        trainer = FederatedTrainer(
            algorithm=self.method,
            federation=Federation(local_engine=engine, pictures_every_n_rounds=0, **self.federation),  # type: ignore[arg-type]
            accelerator="cpu",
            devices=1,
            max_rounds=3,
            precision="64-true",
            logger=False,
            enable_progress_bar=False,
            default_root_dir=str(folder),
            seed=0,
            client_callbacks=[CALLBACKS[name]() for name in self.callbacks],
            **self.trainer,
        )
        with _stacked_clients() as sizes:
            trainer.fit(module, self._data())
        left = Path(str(trainer.run_folder))
        content = load_checkpoint(left / "checkpoints" / "last.ckpt")
        own = content["sparsefl"]
        return {
            "weights": content["state_dict"],
            "server": own["state"],
            "records": records_of(left / "checkpoints", own),
            **{name: table(left / name) for name in ("metrics.csv", "clients.csv", "finetuned.csv")},
        }, bool(sizes)

    def _data(self) -> FederatedDataModule:
        if self.draws is None:
            return FederatedBlobs(num_classes=CLASSES, dim=8, num_train=300, num_test=80, **self.data)
        return Pictures(**self.data)


class Pictures(FederatedDataModule):
    """Noisy pictures of 8 x 8 pixels of four classes."""

    num_classes, sample_shape, num_train = CLASSES, (1, 8, 8), 300

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate the data; see :class:`FederatedDataModule`."""
        rng = torch.Generator().manual_seed(3)
        labels = torch.arange(self.num_train + 80) % CLASSES
        means = torch.randn(CLASSES, *self.sample_shape, generator=rng)
        inputs = means[labels] + torch.randn(len(labels), *self.sample_shape, generator=rng)
        return inputs[:-80], labels[:-80], inputs[-80:], labels[-80:]


def _federation(rng: random.Random) -> dict[str, Any]:
    """Draw options of the federation, most of them at their defaults."""
    return {
        "clients_per_round": rng.choice([3, 4, 5, 5]),
        "stack_size": rng.choice(["auto", 3, 5, 5]),
        **_some(
            rng,
            0.15,
            capacities=[0.5, 1.0],
            execution="cut",
            local_epochs=[1, [1, 3]],
            eval_after_training=True,
            finetune_epochs=1,
            buffers=rng.choice(["local", "server"]),
            wire="encode",
            store="disk",
            unseen_clients=1,
            select="personal/val_loss",
            eval_clients=2,
            record_steps=False,
        ),
        **_some(
            rng,
            0.05,
            clip_update=1.0,
            reducer=rng.choice([CoverageMedian(), TrimmedMean()]),
            server_optimizer=rng.choice([ServerOptimizer(rule="adam", lr=0.01), ServerOptimizer(rule="momentum")]),
        ),
    }


def _trainer(rng: random.Random) -> dict[str, Any]:
    """Draw options of the Trainer."""
    return {
        "max_epochs": rng.choice([1, 2]),
        **_some(
            rng,
            0.12,
            gradient_clip_val=rng.choice([0.3, 1.0]),
            gradient_clip_algorithm=rng.choice(["norm", "value"]),
            limit_train_batches=rng.choice([2, 0.6]),
            accumulate_grad_batches=2,
            check_val_every_n_round=2,
            limit_val_batches=2,
        ),
    }


def _data(rng: random.Random) -> dict[str, Any]:
    """Draw options of the data; no batch has one sample, which a batch norm refuses."""
    partition = rng.choice([IID(), Dirichlet(alpha=0.5, min_examples=20), Dirichlet(alpha=5.0)])
    return {
        "num_clients": CLIENTS,
        "partition": partition,
        "batch_size": rng.choice([5, 8, 16]),
        "drop_last": rng.random() < 0.8,
        "val_fraction": 0.2,
        "test_per_client": 10,
    }


def _some(rng: random.Random, chance: float, **options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if rng.random() < chance}


@contextlib.contextmanager
def _stacked_clients() -> Iterator[list[int]]:
    """Collect the sizes of the stacks that are trained."""
    sizes: list[int] = []
    before = StackedWorker._fit_group

    def fit(worker: Any, group: Any) -> None:
        before(worker, group)
        if len(group) > 1 and all(request.result for request in group):
            sizes.append(len(group))

    with mock.patch.object(StackedWorker, "_fit_group", fit):
        yield sizes


def table(path: Path) -> list[dict[str, Any]]:
    """Read a table without its columns of times, with numbers as numbers; empty if there is no table."""
    read = rows(path) if path.exists() else []
    return [{name: _number(cell) for name, cell in row.items()} for row in read]


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield where two results differ by more than rounding."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if ours.keys() != theirs.keys():
            yield f"{path}: {sorted(map(str, ours.keys() ^ theirs.keys()))} on one side"
        for name in ours.keys() & theirs.keys():
            yield from differences(ours[name], theirs[name], f"{path}/{name}")
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}/{place}")
    elif not _agree(ours, theirs) and not path.endswith("/run"):  # the random name of a run
        yield f"{path}: {_short(ours)} and {_short(theirs)}"


def _agree(ours: Any, theirs: Any) -> bool:
    """Return whether two tensors, numbers or other values are equal up to rounding."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return same and torch.allclose(ours.double(), theirs.double(), TOLERANCE, TOLERANCE, equal_nan=True)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (ours != ours and theirs != theirs)
    return bool(ours == theirs)


def _short(value: Any) -> str:
    return str(value.flatten()[:3].tolist() if isinstance(value, Tensor) else value)[:80]


@dataclass(frozen=True)
class Found:
    """What the comparison of a case has found."""

    refused: str
    """Error of both engines; empty where they have trained."""
    stacked: bool
    """Whether clients were trained in stacks."""
    differences: list[str]


def compare(case: Case) -> Found:
    """Run a case with both engines, and return what is found."""
    refusals: list[str] = []
    left: list[dict[str, Any]] = []
    stacked = False
    for engine in ENGINES:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    found, stacked = case.run(engine, Path(folder))
                    left.append(found)
                    refusals.append("")
                except SparseFLError as error:
                    refusals.append(f"{type(error).__name__}: {error}".replace(folder, ""))
    found_differences = sorted(differences(left[0], left[1])) if len(left) == 2 else []
    if refusals[0] != refusals[1]:
        found_differences.append(" / ".join(refusals))
    return Found(refusals[0], stacked, found_differences)


def numbers(arguments: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of the cases, those of `--cases` or as many as the time allows."""
    if arguments.cases:
        yield from arguments.cases
        return
    end = time.monotonic() + 60 * arguments.minutes
    for number in itertools.count(arguments.first):
        yield number
        if time.monotonic() > end:
            return


def main() -> None:
    """Compare cases, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="time to run cases for")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", nargs="+", type=int, help="numbers of the cases to run, whatever the time")
    parser.add_argument("--show", action="store_true", help="print on stderr what each case is and what is found")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    result: dict[str, Any] = {**environment(), "lightning": L.__version__, "first": arguments.first, "methods": []}
    result |= {"cases": 0, "stacked": 0, "refused": 0, "differences": 0, "found": []}
    for number in numbers(arguments):
        case = Case.of(number)
        found = compare(case)
        if arguments.show:
            print(f"{number}: {case}\n{found}\n", file=sys.stderr)
        result["methods"] = sorted({*result["methods"], type(case.method).__name__})
        result["cases"] += 1
        result["stacked"] += found.stacked
        result["refused"] += bool(found.refused)
        if found.differences:
            result["differences"] += 1
            result["found"].append({"case": number, "parts": found.differences[:5]})
        if arguments.out is not None:  # after each case, since a run may be stopped
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["differences"] else 0)


if __name__ == "__main__":
    main()
