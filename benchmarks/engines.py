"""Rounds of a plain FedAvg loop, of the sequential engine and of the stacked engine, on one and on two ranks.

A cell is a model, a partition of the data, a method, a cohort and a fleet. Its runs take turns, each in a process of
its own; in every cycle the order moves on by one. The plain loop has one thread, and the loaders of as many clients as
a cohort has. A ratio is the median over the cycles of the median round of a run, divided by that of the plain loop in
the same cycle. Rounds include their commits, and no evaluation.

    python benchmarks/engines.py --models MLP LeNet5 --cohorts 10 50 --out result.json

Cells that the file has already are measured again, and the others stay; each names the machine it was measured on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from federated_round import BATCH, RATES, SEED, Bare, Moment, processor
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_sparsefl.algorithms import FedAvg, FedDIP, FedLPS, FedSpa, PerFedMask
from lightning_sparsefl.data import IID, Dirichlet, FederatedDataModule, Partition
from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedFit
from lightning_sparsefl.models import (
    MLP,
    VGG11,
    Classifier,
    LanguageLSTM,
    LeNet5,
    MNISTNet,
    MobileNet,
    PreResNet18,
    ResNet18,
    SmallCNN,
)
from lightning_sparsefl.seeds import generator


class Measured(MLP):
    """MLP that logs its loss and its accuracy by metric objects, as many modules do."""

    def __init__(self) -> None:
        super().__init__(num_classes=10, **RATES)
        self.measured_loss, self.measured_acc = MeanMetric(), MulticlassAccuracy(10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean cross-entropy of a batch, and update and log the objects."""
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.measured_loss(loss)
        self.measured_acc(logits, batch[1])
        self.log("train_loss", self.measured_loss, on_step=False, on_epoch=True)
        self.log("train_acc", self.measured_acc, on_step=False, on_epoch=True)
        return loss


class Watched(MLP):
    """MLP that logs the norms of its gradients, as Lightning's documentation shows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the norm of each gradient, and of all."""
        self.log_dict(grad_norm(self, norm_type=2))


GREY, COLOR = (1, 28, 28), (3, 32, 32)
WORDS = 1000
MODELS: dict[str, tuple[Callable[[], Classifier], tuple[int, ...]]] = {
    "MLP": (lambda: MLP(num_classes=10, **RATES), GREY),
    "MLP, metrics": (Measured, GREY),
    "MLP, norms": (lambda: Watched(num_classes=10, **RATES), GREY),
    "LeNet5": (lambda: LeNet5(num_classes=10, **RATES), GREY),
    "MNISTNet": (lambda: MNISTNet(num_classes=10, **RATES), GREY),
    "SmallCNN": (lambda: SmallCNN(num_classes=10, sample_shape=GREY, **RATES), GREY),
    "VGG11": (lambda: VGG11(num_classes=10, **RATES), COLOR),
    "MobileNet": (lambda: MobileNet(num_classes=10, **RATES), COLOR),
    "PreResNet18": (lambda: PreResNet18(num_classes=10, **RATES), COLOR),
    "ResNet18": (lambda: ResNet18(num_classes=10, **RATES), COLOR),
    "LanguageLSTM": (lambda: LanguageLSTM(num_classes=WORDS, embedding=64, hidden=96, **RATES), (9,)),
}
"""Models and shapes of their samples."""
PARTITIONS: dict[str, Partition] = {
    "even": IID(),
    "dirichlet 0.3": Dirichlet(alpha=0.3),
    "dirichlet 0.1": Dirichlet(alpha=0.1),
}
METHODS: dict[str, tuple[Callable[[], FederatedAlgorithm], dict[str, Any]]] = {
    "FedAvg": (FedAvg, {}),
    "FedSpa": (lambda: FedSpa(density=0.5), {}),
    "FedDIP": (FedDIP, {}),
    "PerFedMask": (PerFedMask, {"capacities": [0.25, 1.0]}),
    "FedLPS": (lambda: FedLPS(refresh="round"), {"capacities": [0.25, 0.5, 1.0], "execution": "cut"}),
    "FedLPS, masks": (FedLPS, {"capacities": [0.25, 0.5, 1.0]}),
}
"""Methods, and options of their federations."""
RUNS = {
    "sequential 1": ("fast", 1),
    "stacked 1": ("stacked", 1),
    "sequential 2": ("fast", 2),
    "stacked 2": ("stacked", 2),
}
"""Engine and number of ranks of each run."""


@dataclass(frozen=True)
class Cell:
    """What a run trains."""

    model: str
    partition: str
    method: str
    cohort: int
    fleet: int
    batch: int = BATCH
    stack_size: int | str = "auto"
    items: bool = False
    """Whether samples are read one by one, as from most data sets, and not as slices of tensors."""


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are read one by one.

    Args:
        examples: Data set of two tensors.
    """

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.examples.inputs[index], self.examples.labels[index]


class Noise(FederatedDataModule):
    """Random samples; tokens for a language model.

    Args:
        cell: The cell.
        samples: Number of training samples of a client, on average.
    """

    def __init__(self, cell: Cell, samples: int) -> None:
        self.items = cell.items
        self.num_train, self.sample_shape = cell.fleet * samples, MODELS[cell.model][1]  # type: ignore[assignment]
        self.num_classes = 10
        super().__init__(
            num_clients=cell.fleet,
            batch_size=cell.batch,
            eval_split="test",
            test_per_client=10,
            partition=PARTITIONS[cell.partition],
            seed=SEED,
        )

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate the data; see :class:`FederatedDataModule`."""
        rng, total = generator(SEED, "noise"), self.num_train + 1000
        shape = (total, *self.sample_shape)
        if len(shape) == 2:  # texts, whose targets are tokens too
            inputs, labels = torch.randint(WORDS, (2, *shape), generator=rng)
        else:
            inputs, labels = torch.randn(shape, generator=rng), torch.arange(total) % self.num_classes
        return inputs[:-1000], labels[:-1000], inputs[-1000:], labels[-1000:]

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """Return the batches of a client; see :class:`FederatedDataModule`."""
        loader = super().client_train_dataloader(client)
        examples: Any = loader.dataset
        return DataLoader(Items(examples), batch_size=loader.batch_size, shuffle=True) if self.items else loader

    def choose_test(self, client: int, train_labels: Tensor, test_labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return ten test examples; texts have no classes to choose by."""
        return torch.arange(self.test_per_client)


class Cohort:
    """The first clients of a fleet, for the plain loop.

    Args:
        data: Data of the fleet.
        size: Number of clients.
    """

    def __init__(self, data: Noise, size: int) -> None:
        self.num_clients, self.num_examples = size, data.num_examples
        self.client_train_dataloader = data.client_train_dataloader


class Clock(Callback):
    """Callback that writes the times of each round, from its start to the start of the next one, to a file.

    Args:
        path: File for the times, written by rank 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moments: list[tuple[Moment, float]] = []
        self.steps = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the time."""
        self.moments.append((Moment.now(), self.steps))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the times of the rounds between the first and the last one."""
        pairs = itertools.pairwise(self.moments[1:])
        rounds = [{**asdict(end - start), "steps": after - before} for (start, before), (end, after) in pairs]
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(rounds))


def run_bare(cell: Cell, samples: int, rounds: int) -> list[dict[str, float]]:
    """Return the times of the rounds of the plain loop, without the first one."""
    torch.manual_seed(SEED)
    data = Noise(cell, samples)
    data.setup()
    bare = Bare(MODELS[cell.model][0]().net, Cohort(data, cell.cohort))  # type: ignore[arg-type]
    times = []
    for number in range(rounds + 1):
        start = Moment.now()
        bare.round(number)
        times.append(asdict(Moment.now() - start))
    return times[1:]


def run_federation(cell: Cell, samples: int, rounds: int, engine: str, ranks: int) -> list[dict[str, float]]:
    """Return the times of the rounds of a federation, without the first and the last one, on rank 0."""
    torch.manual_seed(SEED)
    method, options = METHODS[cell.method]
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Path(folder) / "times.json")
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=ranks,
            strategy="client_parallel_fork" if ranks > 1 else "auto",
            max_rounds=rounds + 2,
            check_val_every_n_round=rounds + 2,
            default_root_dir=folder,
            callbacks=[clock],
            enable_progress_bar=False,
            algorithm=method(),
            federation=Federation(
                clients_per_round=cell.cohort,
                eval_clients=1,
                pictures_every_n_rounds=0,
                local_engine=engine,  # type: ignore[arg-type]
                stack_size=cell.stack_size,  # type: ignore[arg-type]
                **options,
            ),
            seed=SEED,
        )
        with _steps_counted(clock), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that clients of a method train one after another
            trainer.fit(MODELS[cell.model][0](), Noise(cell, samples))
        return list(json.loads(clock.path.read_text()))


@contextlib.contextmanager
def _steps_counted(clock: Clock) -> Iterator[None]:
    """Add the CPU time of the epochs of stacks to a clock."""
    before = StackedFit._epochs

    def epochs(fit: StackedFit) -> None:
        start = time.process_time()
        before(fit)
        clock.steps += time.process_time() - start

    StackedFit._epochs = epochs  # type: ignore[method-assign]
    try:
        yield
    finally:
        StackedFit._epochs = before  # type: ignore[method-assign]


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(function(*arguments))


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, which can fork ranks, as a forked one cannot."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(function, arguments, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"{function.__name__}{arguments} failed in its process") from error
    finally:
        process.join()


def measure(cell: Cell, samples: int, rounds: int, cycles: int, runs: list[str]) -> dict[str, Any]:
    """Measure a cell; return its description with medians over the cycles."""
    sides = ["bare", *runs]
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for cycle in range(cycles):
        for side in sides[cycle % len(sides) :] + sides[: cycle % len(sides)]:
            if side == "bare":
                times = apart(run_bare, cell, samples, rounds)
            else:
                times = apart(run_federation, cell, samples, rounds, *RUNS[side])
            taken[side].append({key: statistics.median(time[key] for time in times) for key in times[0]})
    row: dict[str, Any] = {**asdict(cell), "samples": samples, "rounds": rounds, "cycles": cycles}
    row |= {"load": round(os.getloadavg()[0], 1), "machine": machine()}
    row |= {f"bare_{clock}_s": _median(time[clock] for time in taken["bare"]) for clock in ("cpu", "wall")}
    for side in runs:
        for clock in ("cpu", "wall"):
            pairs = zip(taken[side], taken["bare"], strict=True)
            row[f"{side}_{clock}"] = _median(ours[clock] / bare[clock] for ours, bare in pairs)
    alone = taken.get("stacked 1", [])
    if any(time["steps"] for time in alone):  # some methods' clients are not stacked
        row["besides_steps_ms"] = _median(1000 * (time["cpu"] - time["steps"]) / cell.cohort for time in alone)
    return row


def machine() -> dict[str, Any]:
    """Return what a result says of the machine and the versions."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["MLP", "LeNet5"], help="models")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=["even"], help="partitions of the data")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["FedAvg"], help="methods")
    parser.add_argument("--cohorts", nargs="+", type=int, default=[10, 50], help="numbers of clients in a round")
    parser.add_argument("--fleets", nargs="+", type=int, default=[1], help="numbers of clients, in cohorts")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="engine and number of ranks")
    parser.add_argument("--samples", type=int, default=500, help="number of training samples of a client, on average")
    parser.add_argument("--batch", type=int, default=BATCH, help="number of samples in a batch")
    parser.add_argument("--items", action="store_true", help="read samples one by one")
    parser.add_argument("--stack-size", type=_stack_size, default="auto", help="largest number of clients in a stack")
    parser.add_argument("--rounds", type=int, default=4, help="number of measured rounds of a run")
    parser.add_argument("--cycles", type=int, default=3, help="number of runs of each side")
    parser.add_argument("--out", type=Path, help="file for the JSON; cells that it holds are kept")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text())["cells"] if options.out and options.out.exists() else []
    cells: Mapping[Any, Any] = {_name(cell): cell for cell in kept}
    result: dict[str, Any] = {}
    grid = (options.models, options.partitions, options.methods, options.cohorts, options.fleets)
    for model, partition, method, cohort, fleet in itertools.product(*grid):
        cell = Cell(model, partition, method, cohort, cohort * fleet, options.batch, options.stack_size, options.items)
        row = measure(cell, options.samples, options.rounds, options.cycles, options.runs)
        cells = {**cells, _name(row): row}
        result["cells"] = list(cells.values())
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _stack_size(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _name(row: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("model", "partition", "method", "cohort", "fleet", "batch", "stack_size", "samples")
    return (*(row[key] for key in keys), row.get("items", False))


if __name__ == "__main__":
    main()
