"""What a round of `FederatedTrainer` costs over a bare FedAvg loop: 10 clients of 500 samples, batches of 20.

Both sides train the same clients on the same batches of the same loaders, in turns within one process and one thread,
in an order that flips every round, and must end a round with the same weights. A ratio is the median over the rounds
of our time over the bare loop's.

    python benchmarks/federated_round.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl.algorithms import FedAvg, FedSpa
from lightning_sparsefl.data import FederatedDataModule
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.models import MLP, LeNet5
from lightning_sparsefl.models.task import Classifier
from lightning_sparsefl.seeds import derive_seed, generator

SEED, BATCH, RATES = 0, 20, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
TOLERANCE = 1e-6
"""Largest difference of two weights after one round: the bare loop averages in float32, we in float64."""


class Pictures(FederatedDataModule):
    """Noise of MNIST's shape, as float32, so that a loader costs as little as a loader can.

    Args:
        clients: Number of clients.
        samples: Training samples of each.
    """

    num_classes, sample_shape = 10, (1, 28, 28)

    def __init__(self, clients: int, samples: int) -> None:
        self.num_train = clients * samples
        super().__init__(num_clients=clients, batch_size=BATCH, eval_split="test", test_per_client=10, seed=SEED)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`FederatedDataModule`."""
        rng, total = generator(SEED, "noise"), self.num_train + 100
        images, labels = torch.randn(total, *self.sample_shape, generator=rng), torch.arange(total) % self.num_classes
        return images[:-100], labels[:-100], images[-100:], labels[-100:]


class Silent(Classifier):
    """Trains without a log."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The batch's mean cross-entropy."""
        inputs, targets = batch
        return cross_entropy(self(inputs), targets)


class SilentLeNet5(Silent, LeNet5):
    """The same network, without a log."""


class SilentMLP(Silent, MLP):
    """The same network, without a log."""


class Bare:
    """FedAvg as one would write it by hand.

    Args:
        net: Of the first weights; changed in place.
        data: The clients', all of whom take part.
    """

    def __init__(self, net: nn.Module, data: Pictures) -> None:
        self.net, self.data = net, data
        self.weights = [parameter.detach().clone() for parameter in net.parameters()]

    def round(self, number: int) -> None:
        """Train every client from the same weights, and average by samples."""
        sums = [torch.zeros_like(weight) for weight in self.weights]
        total = sum(self.data.num_examples(client) for client in range(self.data.num_clients))
        for client in range(self.data.num_clients):
            self._load()
            torch.manual_seed(derive_seed(SEED, number, client, "fit", 0))
            self._train(self.data.client_train_dataloader(client))
            with torch.no_grad():
                torch._foreach_add_(sums, list(self.net.parameters()), alpha=self.data.num_examples(client) / total)
        self.weights = sums

    @torch.no_grad()
    def _load(self) -> None:
        for parameter, weight in zip(self.net.parameters(), self.weights, strict=True):
            parameter.copy_(weight)

    def _train(self, loader: Any) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), **RATES)
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(self.net(inputs), targets).backward()
            optimizer.step()


@dataclass(frozen=True)
class Moment:
    """A time, or the time between two, in seconds."""

    cpu: float
    """Of this process, on all its threads."""
    wall: float

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        return cls(time.process_time(), time.perf_counter())

    def __sub__(self, earlier: Moment) -> Moment:
        return Moment(self.cpu - earlier.cpu, self.wall - earlier.wall)


class Referee(Callback):
    """Lets the bare loop run before a round of the trainer, or after it, in turns, and times both.

    Args:
        bare: The other side.
    """

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.times: dict[str, list[Moment]] = {"bare": [], "round": [], "committed": []}
        self.differences: list[float] = []
        self._started: Moment | None = None
        self._number = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """The round before is committed by now; the next one begins when this returns."""
        self._finish(pl_module)
        if self._number % 2 == 0:
            self._run_bare()
        self._started = Moment.now()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Clients are shown when all are trained and merged, so the first one ends the round's own time."""
        if batch_idx == 0 and self._started is not None:
            self.times["round"].append(Moment.now() - self._started)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """The last round is committed."""
        self._finish(pl_module)

    def _finish(self, module: LightningModule) -> None:
        """End a round: give the bare loop its turn if it had none, and compare what a commit leaves in the module."""
        if self._started is None:
            return
        self.times["committed"].append(Moment.now() - self._started)
        if self._number % 2 == 1:
            self._run_bare()
        pairs = zip(module.parameters(), self.bare.weights, strict=True)
        self.differences.append(max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs))
        self._number, self._started = self._number + 1, None

    def _run_bare(self) -> None:
        start = Moment.now()
        self.bare.round(self._number)
        self.times["bare"].append(Moment.now() - start)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    model: type[Classifier]
    algorithm: FederatedAlgorithm
    equal: bool = True
    """Whether the bare loop does the same arithmetic, so that its weights must be the same."""


CASES = {
    "lenet5": Case(SilentLeNet5, FedAvg()),
    "lenet5_logging": Case(LeNet5, FedAvg()),
    "mlp": Case(SilentMLP, FedAvg()),
    "mlp_logging": Case(MLP, FedAvg()),
    "lenet5_fedspa": Case(SilentLeNet5, FedSpa(density=0.5, search="static"), equal=False),
}


def compare(case: Case, clients: int, samples: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, without the first one, which warms up, and the last one, which also evaluates."""
    torch.manual_seed(SEED)
    module, data = case.model(num_classes=10, **RATES), Pictures(clients, samples)
    data.setup()
    referee = Referee(Bare(copy.deepcopy(module.net), data))
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 2,
            check_val_every_n_round=rounds + 2,
            default_root_dir=folder,
            callbacks=[referee],
            enable_progress_bar=False,
            algorithm=case.algorithm,
            federation=Federation(clients_per_round=clients, pictures_every_n_rounds=0),
            seed=SEED,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, data)
    if case.equal and not referee.differences[0] <= TOLERANCE:
        sys.exit(
            f"After one round the two sides have different weights, by {referee.differences[0]:.1e} where at most "
            f"{TOLERANCE:.0e} was expected, so their times do not compare."
        )
    times = {side: taken[1:-1] for side, taken in referee.times.items()}
    return {
        "model": case.model.__name__.removeprefix("Silent"),
        "logs": not issubclass(case.model, Silent),
        "algorithm": repr(case.algorithm),
        "difference_after_one_round": referee.differences[0] if case.equal else None,
        **_summary("cpu", {side: [moment.cpu for moment in taken] for side, taken in times.items()}),
        **_summary("wall", {side: [moment.wall for moment in taken] for side, taken in times.items()}),
    }


def _summary(clock: str, times: Mapping[str, list[float]]) -> dict[str, float]:
    """Medians of seconds, and of the ratios within a round."""
    seconds = {f"{clock}_{side}_s": statistics.median(taken) for side, taken in times.items()}
    ratios = {
        f"{clock}_ratio_{side}": statistics.median(ours / bare for ours, bare in zip(taken, times["bare"], strict=True))
        for side, taken in times.items()
        if side != "bare"
    }
    return {name: round(value, 5) for name, value in (seconds | ratios).items()}


def processor() -> str:
    """Name of the processor, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure, print JSON, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10, help="clients, all of which take part in every round")
    parser.add_argument("--samples", type=int, default=500, help="training samples of a client")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are measured")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to compare")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = {"clients": arguments.clients, "samples": arguments.samples, "rounds": arguments.rounds}
    result = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "batch": BATCH,
        **size,
        "cases": {name: compare(CASES[name], **size) for name in arguments.cases},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
