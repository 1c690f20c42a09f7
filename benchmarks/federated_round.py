"""Overhead of a round of `FederatedTrainer` over a plain FedAvg loop: 10 clients of 500 samples, batches of 20.

Both sides train the same clients on the same batches of the same loaders, in turns within one process and one thread.
Their order alternates between rounds, and they must end each round with the same weights. A ratio is the median over
the rounds of our time divided by that of the plain loop.

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
from typing import Any, Literal

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
from lightning_sparsefl.seeds import derive_key, derive_seed, generator

SEED, BATCH, RATES = 0, 20, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
TOLERANCES = {"fast": 1e-6, "stacked": 1e-5}
"""Largest difference of two weights after one round, by engine: the plain loop averages in float32, we in float64, and
the convolutions of a stack add in another order, by which a ReLU may change its side."""


class Pictures(FederatedDataModule):
    """Random float32 images with the shape of MNIST, which need no conversion by the loader.

    Args:
        clients: Number of clients.
        samples: Number of training samples of each client.
    """

    num_classes, sample_shape = 10, (1, 28, 28)

    def __init__(self, clients: int, samples: int) -> None:
        self.num_train = clients * samples
        super().__init__(num_clients=clients, batch_size=BATCH, eval_split="test", test_per_client=10, seed=SEED)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate the data; see :class:`FederatedDataModule`."""
        rng, total = generator(SEED, "noise"), self.num_train + 100
        images, labels = torch.randn(total, *self.sample_shape, generator=rng), torch.arange(total) % self.num_classes
        return images[:-100], labels[:-100], images[-100:], labels[-100:]


class Silent(Classifier):
    """Classifier that does not log."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        inputs, targets = batch
        return cross_entropy(self(inputs), targets)


class SilentLeNet5(Silent, LeNet5):
    """LeNet5 that does not log."""


class SilentMLP(Silent, MLP):
    """MLP that does not log."""


class Bare:
    """Plain FedAvg loop.

    Args:
        net: Network with the initial weights; changed in place.
        data: Data of the clients, all of which take part in each round.
    """

    def __init__(self, net: nn.Module, data: Pictures) -> None:
        self.net, self.data = net, data
        self.weights = [parameter.detach().clone() for parameter in net.parameters()]

    def round(self, number: int) -> None:
        """Train every client from the same weights, and average weighted by samples."""
        sums = [torch.zeros_like(weight) for weight in self.weights]
        total = sum(self.data.num_examples(client) for client in range(self.data.num_clients))
        for client in range(self.data.num_clients):
            self._load()
            torch.manual_seed(derive_seed(derive_key(SEED, "client", client), number, "train", "fit", 0))
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
    """A time, or the difference of two times, in seconds."""

    cpu: float
    """CPU time of this process, of all threads."""
    wall: float

    @classmethod
    def now(cls) -> Moment:
        """Return the current time."""
        return cls(time.process_time(), time.perf_counter())

    def __sub__(self, earlier: Moment) -> Moment:
        return Moment(self.cpu - earlier.cpu, self.wall - earlier.wall)


class Referee(Callback):
    """Callback that runs the plain loop before or after a round of the trainer, in turns, and times both.

    Args:
        bare: Plain loop.
    """

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.times: dict[str, list[Moment]] = {"bare": [], "round": [], "committed": []}
        self.differences: list[float] = []
        self._started: Moment | None = None
        self._number = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the previous round, which is committed now, and start the next one."""
        self._finish(pl_module)
        if self._number % 2 == 0:
            self._run_bare()
        self._started = Moment.now()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock of a round at its first batch, which is reported after all clients are trained and merged."""
        if batch_idx == 0 and self._started is not None:
            self.times["round"].append(Moment.now() - self._started)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the last round, which is committed now."""
        self._finish(pl_module)

    def _finish(self, module: LightningModule) -> None:
        """End a round: run the plain loop if it has not run yet, and compare the committed weights."""
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
    """Whether the plain loop does the same arithmetic, so that its weights must be equal."""
    engine: Literal["fast", "stacked"] = "fast"
    """Option `federation.local_engine`."""


CASES = {
    "lenet5": Case(SilentLeNet5, FedAvg()),
    "lenet5_logging": Case(LeNet5, FedAvg()),
    "mlp": Case(SilentMLP, FedAvg()),
    "mlp_logging": Case(MLP, FedAvg()),
    "lenet5_fedspa": Case(SilentLeNet5, FedSpa(density=0.5, search="static"), equal=False),
    "lenet5_stacked": Case(LeNet5, FedAvg(), engine="stacked"),
    "mlp_stacked": Case(MLP, FedAvg(), engine="stacked"),
}


def compare(case: Case, clients: int, samples: int, rounds: int) -> dict[str, Any]:
    """Compare by medians over the rounds, without the first (warm-up) and the last (evaluation)."""
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
            federation=Federation(clients_per_round=clients, pictures_every_n_rounds=0, local_engine=case.engine),
            seed=SEED,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, data)
    tolerance = TOLERANCES[case.engine]
    if case.equal and not referee.differences[0] <= tolerance:
        sys.exit(
            f"The weights of the two sides differ by {referee.differences[0]:.1e} after one round; expected at most "
            f"{tolerance:.0e}, so their times cannot be compared."
        )
    times = {side: taken[1:-1] for side, taken in referee.times.items()}
    return {
        "model": case.model.__name__.removeprefix("Silent"),
        "logs": not issubclass(case.model, Silent),
        "algorithm": repr(case.algorithm),
        "options": {"local_engine": case.engine},
        "difference_after_one_round": referee.differences[0] if case.equal else None,
        **_summary("cpu", {side: [moment.cpu for moment in taken] for side, taken in times.items()}),
        **_summary("wall", {side: [moment.wall for moment in taken] for side, taken in times.items()}),
    }


def _summary(clock: str, times: Mapping[str, list[float]]) -> dict[str, float]:
    """Compute the medians of the seconds and of the ratios within a round."""
    seconds = {f"{clock}_{side}_s": statistics.median(taken) for side, taken in times.items()}
    ratios = {
        f"{clock}_ratio_{side}": statistics.median(ours / bare for ours, bare in zip(taken, times["bare"], strict=True))
        for side, taken in times.items()
        if side != "bare"
    }
    return {name: round(value, 5) for name, value in (seconds | ratios).items()}


def processor() -> str:
    """Return the name of the processor, if the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients", type=int, default=10, help="number of clients, all of which take part in every round"
    )
    parser.add_argument("--samples", type=int, default=500, help="number of training samples of a client")
    parser.add_argument("--rounds", type=int, default=20, help="number of measured rounds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to compare")
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
