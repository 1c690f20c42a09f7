"""Rounds of FedAvg on one device: a plain loop, and every way in which the package trains the clients of a rank.

First the float64 weights of clients that train as a stack are compared on the device with those of clients that train
one after another; the script stops if they differ. Then each case runs in a process of its own: the plain loop (with
the data in the device's memory), clients one after another, as stacks, and on two and three ranks of one device. A time
is the median of a round without the first one, which warms up. Cases that the time limit leaves out are null.

    python benchmarks/gpu.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_sparsefl.algorithms import FedAvg
from lightning_sparsefl.data import FederatedDataModule
from lightning_sparsefl.federated import FederatedTrainer, Federation
from lightning_sparsefl.models import MLP, LeNet5, ResNet18
from lightning_sparsefl.models.task import Classifier
from lightning_sparsefl.seeds import generator

SEED, BATCH, RATES = 0, 20, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
TOLERANCE = 1e-9
"""Largest difference of two float64 weights after one round, relative to the largest change of a weight."""
IS_FIRST = os.environ.get("LOCAL_RANK", "0") == "0"
"""Whether this is the first rank; the launcher starts the others with another number."""
MODELS: dict[str, tuple[type[Classifier], tuple[int, int, int]]] = {
    "mlp": (MLP, (1, 28, 28)),
    "lenet5": (LeNet5, (1, 28, 28)),
    "resnet18": (ResNet18, (3, 32, 32)),
}
MODES: dict[str, Mapping[str, Any]] = {
    "sequential": {"local_engine": "fast"},
    "stacked": {"local_engine": "stacked"},
    "sequential, 2 workers": {"local_engine": "fast", "workers_per_device": 2},
    "sequential, 3 workers": {"local_engine": "fast", "workers_per_device": 3},
    "stacked, 2 workers": {"local_engine": "stacked", "workers_per_device": 2},
    "stacked, 3 workers": {"local_engine": "stacked", "workers_per_device": 3},
}


class Pictures(FederatedDataModule):
    """Random float32 images.

    Args:
        shape: Shape of an image.
        clients: Number of clients.
        samples: Number of training samples of each client.
    """

    num_classes = 10

    def __init__(self, shape: tuple[int, int, int], clients: int, samples: int) -> None:
        self.sample_shape, self.num_train = shape, clients * samples
        super().__init__(num_clients=clients, batch_size=BATCH, eval_split="test", test_per_client=10, seed=SEED)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate the data; see :class:`FederatedDataModule`."""
        rng, total = generator(SEED, "noise"), self.num_train + 100
        images, labels = torch.randn(total, *self.sample_shape, generator=rng), torch.arange(total) % self.num_classes
        return images[:-100], labels[:-100], images[-100:], labels[-100:]


def made(model: str) -> Classifier:
    """Return a module with the initial weights of all cases."""
    torch.manual_seed(SEED)
    kind, shape = MODELS[model]
    return kind(num_classes=10, sample_shape=shape, **RATES)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare(model: str, clients: int, samples: int, rounds: int, device: torch.device) -> float:
    """Return the median seconds of a round of a plain loop.

    Args:
        model: Name of the model.
        clients: Number of clients in a round.
        samples: Number of training samples of each client.
        rounds: Number of rounds after the first one.
        device: Device of model and data.
    """
    net, (_, shape) = made(model).net.to(device), MODELS[model]
    images = torch.randn(clients, samples, *shape, device=device)
    labels = (torch.arange(clients * samples, device=device) % 10).view(clients, samples)
    weights, times = [parameter.detach().clone() for parameter in net.parameters()], list[float]()
    for _ in range(rounds + 1):
        wait(device)
        started = time.perf_counter()
        sums = [torch.zeros_like(weight) for weight in weights]
        for client in range(clients):
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), weights)
            optimizer = torch.optim.SGD(net.parameters(), **RATES)
            for indices in torch.randperm(samples, device=device).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(net(images[client, indices]), labels[client, indices]).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(sums, list(net.parameters()), alpha=1 / clients)
        weights = sums
        wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def fit(
    model: str,
    clients: int,
    samples: int,
    rounds: int,
    accelerator: str,
    options: Mapping[str, Any],
    precision: str = "32-true",
) -> tuple[dict[str, Tensor], list[float]]:
    """Train a federation all of whose clients take part in each round.

    Args:
        model: Name of the model.
        clients: Number of clients in a round.
        samples: Number of training samples of each client.
        rounds: Number of rounds.
        accelerator: Accelerator, one of the values of `Trainer`.
        options: Further options of the federation.
        precision: Option `trainer.precision`.

    Returns:
        The weights, and on the first rank the seconds of each round.
    """
    module = made(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator=accelerator,
            devices=1,
            max_rounds=rounds,
            check_val_every_n_round=rounds,
            default_root_dir=folder,
            enable_progress_bar=False,
            precision=precision,
            algorithm=FedAvg(),
            federation=Federation(clients_per_round=clients, pictures_every_n_rounds=0, **options),
            seed=SEED,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, Pictures(MODELS[model][1], clients, samples))
        times = list[float]()
        if IS_FIRST:
            with (Path(trainer.run_folder) / "metrics.csv").open() as file:
                times = [float(row["time/round"]) for row in csv.DictReader(file)]
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}, times


def difference(model: str, accelerator: str) -> float:
    """Return how far stacked clients end from those that train one after another, relative to their largest change.

    Args:
        model: Name of the model.
        accelerator: Accelerator, one of the values of `Trainer`.
    """
    ends = []
    for mode in ("sequential", "stacked"):
        options = {**MODES[mode], **({"stack_size": 3} if mode == "stacked" else {})}
        ends.append(fit(model, 3, 2 * BATCH, 1, accelerator, options, "64-true")[0])
    start = made(model).state_dict()
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in ends[0].items())
    return max(float((ends[1][name] - tensor).abs().max()) for name, tensor in ends[0].items()) / moved


def one(arguments: argparse.Namespace) -> None:
    """Run one case, and print its seconds; the ranks that the trainer starts run this again, and print nothing."""
    model, clients, mode = arguments.one[0], int(arguments.one[1]), arguments.one[2]
    device = torch.device("cpu" if arguments.accelerator == "cpu" else "cuda")
    if mode == "correctness":
        seconds = difference(model, arguments.accelerator)
    elif mode == "bare":
        seconds = bare(model, clients, arguments.samples, arguments.rounds, device)
    else:
        size = (model, clients, arguments.samples, arguments.rounds + 1, arguments.accelerator)
        _, times = fit(*size, MODES[mode])
        if not IS_FIRST:
            return
        seconds = statistics.median(times[1:])
    print(f"\nresult {seconds!r}")


def run(arguments: argparse.Namespace, model: str, clients: int, mode: str, limit: float) -> float | None:
    """Run one case in a process of its own; return its result, or None if it takes longer than the limit."""
    command = [sys.executable, __file__, "--one", model, str(clients), mode]
    for name in ("accelerator", "samples", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit, 1.0))
    except subprocess.TimeoutExpired:
        return None
    found = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not found:
        sys.exit(f"{model}, {clients} clients, {mode}: the process failed.\n{done.stderr[-2000:]}")
    return float(found[-1].removeprefix("result "))


def main() -> None:
    """Compare and measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to run")
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100], help="numbers of clients in a round")
    parser.add_argument("--modes", nargs="+", choices=["bare", *MODES], default=["bare", *MODES], help="modes to run")
    parser.add_argument("--samples", type=int, default=200, help="number of training samples of each client")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds after the first one")
    parser.add_argument("--minutes", type=float, default=7.5, help="limit of the whole script")
    parser.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"], help="device to run on")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "CLIENTS", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.accelerator == "cuda" and not torch.cuda.is_available():
        sys.exit("No CUDA device was found; expected one, or `--accelerator cpu`.")
    if arguments.one:
        one(arguments)
        return
    end = time.perf_counter() + 60 * arguments.minutes
    differences: dict[str, float | None] = {}
    for model in arguments.models:
        found = differences[model] = run(arguments, model, 3, "correctness", end - time.perf_counter())
        if found is None or not found <= TOLERANCE:
            sys.exit(
                f"{model}: stacked clients end {found} (relative) from those that train one after another; expected at "
                f"most {TOLERANCE:.0e}, so their times cannot be compared."
            )
    cuda = arguments.accelerator == "cuda"
    result = {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "torch": torch.__version__,
        "samples": arguments.samples,
        "rounds": arguments.rounds,
        "float64_difference": differences,
        "seconds": {
            model: {
                str(clients): {
                    mode: run(arguments, model, clients, mode, end - time.perf_counter()) for mode in arguments.modes
                }
                for clients in sorted(arguments.clients)
            }
            for model in arguments.models
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
