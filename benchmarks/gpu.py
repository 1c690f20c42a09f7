"""Rounds of FedAvg on one device: a plain loop, and every way in which the package trains the clients of a rank.

First the float64 weights of clients that train as a stack are compared on the device with those of clients that train
one after another; the script stops if they differ. Then, for each model and number of clients, one process measures the
plain loop (with the data in the device's memory), clients one after another, stacks whose kernels are launched one by
one, and stacks whose steps are CUDA graphs. Two and three ranks of one device follow. A time is the median of a round
without the first two, in which steps are captured. Cases that the time limit leaves out are null.

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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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

WARM = 2
"""Number of rounds before those that are measured."""
SEED, BATCH, RATES = 0, 20, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
TOLERANCE = 1e-9
"""Largest difference of two float64 weights after one round, relative to the largest change of a weight."""
IS_FIRST = os.environ.get("LOCAL_RANK", "0") == "0"
"""Whether this is the first rank; the launcher starts the others with another number."""
MODELS: dict[str, tuple[type[Classifier], tuple[int, int, int], int]] = {
    "mlp": (MLP, (1, 28, 28), 500),
    "lenet5": (LeNet5, (1, 28, 28), 500),
    "resnet18": (ResNet18, (3, 32, 32), 100),
}
"""Class, shape of a sample, and number of training samples of each client."""
MODES: dict[str, Mapping[str, Any]] = {
    "sequential": {"local_engine": "fast"},
    "stacked, no graphs": {"local_engine": "stacked", "record_steps": False},
    "stacked": {"local_engine": "stacked"},
    "stacked, 2 workers": {"local_engine": "stacked", "workers_per_device": 2},
    "sequential, 2 workers": {"local_engine": "fast", "workers_per_device": 2},
    "sequential, 3 workers": {"local_engine": "fast", "workers_per_device": 3},
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
    kind, shape, _ = MODELS[model]
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
        rounds: Number of measured rounds.
        device: Device of model and data.
    """
    net, shape = made(model).net.to(device), MODELS[model][1]
    images = torch.randn(clients, samples, *shape, device=device)
    labels = (torch.arange(clients * samples, device=device) % 10).view(clients, samples)
    weights, times = [parameter.detach().clone() for parameter in net.parameters()], list[float]()
    for _ in range(rounds + WARM):
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
    return statistics.median(times[WARM:])


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

    They take more steps than it takes until a step is recorded and captured as a graph.

    Args:
        model: Name of the model.
        accelerator: Accelerator, one of the values of `Trainer`.
    """
    ends = []
    for mode in ("sequential", "stacked"):
        options = {**MODES[mode], **({"stack_size": 3} if mode == "stacked" else {})}
        ends.append(fit(model, 3, 10 * BATCH, 1, accelerator, options, "64-true")[0])
    start = made(model).state_dict()
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in ends[0].items())
    return max(float((ends[1][name] - tensor).abs().max()) for name, tensor in ends[0].items()) / moved


def measure(arguments: argparse.Namespace) -> None:
    """Run cases of one model and number of clients, and print the result of each.

    The ranks that the trainer starts run this again, and print nothing.
    """
    model, clients, *modes = arguments.measure
    device = torch.device("cpu" if arguments.accelerator == "cpu" else "cuda")
    for mode in modes:
        samples = arguments.samples or MODELS[model][2]
        if mode == "correctness":
            result = difference(model, arguments.accelerator)
        elif mode == "bare":
            result = bare(model, int(clients), samples, arguments.rounds, device)
        else:
            size = (model, int(clients), samples, arguments.rounds + WARM, arguments.accelerator)
            _, times = fit(*size, MODES[mode])
            result = statistics.median(times[WARM:]) if IS_FIRST else 0.0
        if IS_FIRST:
            print(f"\nresult {json.dumps([mode, result])}", flush=True)


def run(
    arguments: argparse.Namespace, model: str, clients: int, modes: Sequence[str], limit: float
) -> dict[str, float | None]:
    """Run cases in a process of their own; return their results, None for those that the limit leaves out."""
    command = [sys.executable, __file__, "--measure", model, str(clients), *modes]
    for name in ("accelerator", "samples", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    results: dict[str, float | None] = dict.fromkeys(modes)
    if limit <= 0:
        return results
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        output, errors = process.communicate()
    else:
        if process.returncode:
            sys.exit(f"{model}, {clients} clients, {', '.join(modes)}: the process failed.\n{errors[-2000:]}")
    found = [line.removeprefix("result ") for line in output.splitlines() if line.startswith("result ")]
    return results | dict(map(json.loads, found))


def require_agreement(model: str, worst: float | None) -> None:
    """Stop the script if the engines end with other weights; None is a comparison that the limit leaves out."""
    if worst is not None and not worst <= TOLERANCE:
        sys.exit(
            f"{model}: stacked clients end {worst} (relative) from those that train one after another; "
            f"expected at most {TOLERANCE:.0e}, so their times cannot be compared."
        )


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all cases within the limit of time, those of one process first; return what is written to `--out`."""
    end = time.perf_counter() + 60 * arguments.minutes
    differences: dict[str, float | None] = {}
    sizes = [(model, clients) for clients in sorted(arguments.clients) for model in arguments.models]
    alone = [mode for mode in arguments.modes if "workers" not in mode]
    seconds: dict[str, dict[str, dict[str, float | None]]] = {model: {} for model in arguments.models}
    for model, clients in sizes:
        modes = alone if model in differences else ["correctness", *alone]
        found = run(arguments, model, clients, modes, end - time.perf_counter())
        if "correctness" in found:
            differences[model] = found.pop("correctness")
            require_agreement(model, differences[model])
        seconds[model][str(clients)] = found
    for mode in (mode for mode in arguments.modes if "workers" in mode):
        for model, clients in reversed(sizes):
            seconds[model][str(clients)] |= run(arguments, model, clients, [mode], end - time.perf_counter())
    return {
        "device": torch.cuda.get_device_name() if arguments.accelerator == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "samples": {model: arguments.samples or MODELS[model][2] for model in arguments.models},
        "rounds": arguments.rounds,
        "float64_difference": differences,
        "seconds": seconds,
    }


def parse_arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to run")
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100], help="numbers of clients in a round")
    parser.add_argument("--modes", nargs="+", choices=["bare", *MODES], default=["bare", *MODES], help="modes to run")
    parser.add_argument(
        "--samples", type=int, default=0, help="number of training samples of each client; 0 = by model"
    )
    parser.add_argument("--rounds", type=int, default=2, help="number of measured rounds")
    parser.add_argument("--minutes", type=float, default=7.5, help="limit of the whole script")
    parser.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"], help="device to run on")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--measure", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Compare and measure, print JSON, and write it to `--out`."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.accelerator == "cuda" and not torch.cuda.is_available():
        sys.exit("No CUDA device was found; expected one, or `--accelerator cpu`.")
    if arguments.measure:
        measure(arguments)
        return
    text = json.dumps(compare(arguments), indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
