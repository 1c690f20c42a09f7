"""Rounds of FedAvg of this package, of pfl-research and of FedJAX, as multiples of a plain one-thread PyTorch loop.

All sides train the same network from the same weights on the same random samples of the same clients, all of which take
part in each round: one local epoch in batches of 20, SGD with momentum and weight decay, a mean weighted by samples.
Runs take turns, each in a process of its own; in every cycle the order moves on by one. The first round of a run, which
compiles and warms up, is not counted, and nothing is evaluated in the others. A ratio is the median over the cycles of
the median wall time of a round, divided by that of the plain loop in the same cycle.

- `bare` is the plain loop of `federated_round.py`, on one thread.
- `sequential` and `stacked` are the engines of this package on one and two ranks of one thread, as in `engines.py`.
  They alone log loss and accuracy in each step, and commit each round.
- `pfl` is pfl's `SimulatedBackend` with PyTorch, in one and two processes of one thread. It alone reads the samples of
  a client in the same order in each round, so that it does not copy them.
- `fedjax` is FedJAX's `fed_avg` with its default backend `jit`, for which XLA may use all cores, and `fedjax, one core`
  the same in a process that is bound to one core (Linux).

First each peer trains two rounds on clients each of whom has one sample many times, so that the order of batches has no
effect. The script stops if its weights differ from those of the plain loop, as they do after other steps, or another
number of them. For the engines of this package, `federated_round.py` does this.

A peer that is not installed is left out. The peers may need an environment of their own:

    pip install -e . pfl fedjax 'jax[cpu]' dm-haiku optax
    python benchmarks/peers.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import MODELS, RUNS, Cell, Noise, apart, machine, run_bare, run_federation
from federated_round import BATCH, RATES, SEED, Bare
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import cross_entropy

SAMPLES = {"MLP": 500, "LeNet5": 200}
"""Models, and the default number of samples of a client."""
NEEDED = {"pfl": ("pfl",), "fedjax": ("fedjax", "jax", "dm-haiku", "optax")}
"""Distributions that each peer needs."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
"""Variables of all sides. XLA has threads of its own, whose number they do not limit."""
TOLERANCE = 1e-5
"""Largest difference of two weights after two rounds, all in float32."""

Weights = dict[str, dict[str, np.ndarray]]
"""Weights `w` and biases `b` of each layer in haiku's layout."""
Trained = tuple[list[float], Weights]
"""Wall times of all rounds but the first one, in seconds, and the weights after the last one."""


class Alike(Noise):
    """Clients each of whom has one sample many times."""

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate the data; see :class:`FederatedDataModule`."""
        inputs, labels, *test = super().load()
        size = self.num_train // self.num_clients
        first = torch.arange(self.num_train) // size * size
        return inputs[first], labels[first], test[0], test[1]

    def assign(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Return the rows of each client."""
        return list(torch.arange(self.num_train).chunk(self.num_clients))


class Learner(nn.Module):
    """Network with the methods that pfl calls.

    Args:
        net: Network from a batch of samples to logits of shape (batch, classes).
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        return cross_entropy(self.net(inputs), labels)

    def metrics(self, *batch: Tensor) -> dict[str, Any]:
        """Return no metrics; pfl evaluates in the first round only, which is not counted."""
        return {}


def made(model: str) -> nn.Module:
    """Return a network with the initial weights of all sides."""
    torch.manual_seed(SEED)
    return MODELS[model][0]().net


def clients_of(cell: Cell, samples: int, alike: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the samples and labels of each client; if they are `alike`, one sample many times."""
    data = (Alike if alike else Noise)(cell, samples)
    data.setup()
    parts: list[Any] = [data.client_train_dataloader(client).dataset for client in range(cell.cohort)]
    return [(part.inputs, part.labels) for part in parts]


def weights_of(net: nn.Module) -> Weights:
    """Return the weights of a network in haiku's layout, in which the channels of images are last."""
    found, channels = {}, 1
    for name, layer in net.named_children():
        if isinstance(layer, nn.Conv2d):
            found[name], channels = {"w": layer.weight.permute(2, 3, 1, 0), "b": layer.bias}, layer.out_channels
        elif isinstance(layer, nn.Linear):
            weight = layer.weight.view(layer.out_features, channels, -1).permute(2, 1, 0)
            found[name], channels = {"w": weight.reshape(-1, layer.out_features), "b": layer.bias}, 1
    return {name: {key: value.detach().numpy() for key, value in own.items()} for name, own in found.items()}


def in_haiku(net: nn.Module) -> Callable[[Any], Any]:
    """Return the same layers in haiku."""
    import haiku as hk
    import jax

    layers: list[Any] = []
    for name, layer in net.named_children():
        if isinstance(layer, nn.Conv2d):
            layers.append(hk.Conv2D(layer.out_channels, layer.kernel_size, padding="VALID", name=name))
        elif isinstance(layer, nn.Linear):
            layers.append(hk.Linear(layer.out_features, name=name))
        elif isinstance(layer, nn.MaxPool2d):
            layers.append(hk.MaxPool(layer.kernel_size, layer.stride, "VALID"))
        else:
            layers.append(jax.nn.relu if isinstance(layer, nn.ReLU) else hk.Flatten())
    return hk.Sequential(layers)


def train_bare(cell: Cell, samples: int, rounds: int) -> Weights:
    """Train clients that have one sample each with the plain loop."""
    data = Alike(cell, samples)
    data.setup()
    bare = Bare(made(cell.model), data)  # type: ignore[arg-type]
    for number in range(rounds + 1):
        bare.round(number)
    bare._load()
    return weights_of(bare.net)


def train_pfl(cell: Cell, samples: int, rounds: int, ranks: int, alike: bool = False) -> Trained:
    """Train with pfl, in processes that start as those of `torchrun` do."""
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(1, 1, ranks, DefaultLogsSpecs(folder), "peers", max_restarts=0, local_addr="localhost")
        config.rdzv_backend, config.rdzv_endpoint = "c10d", "localhost:0"
        return elastic_launch(config, _rank_of_pfl)(cell, samples, rounds, alike)[0]


def _rank_of_pfl(cell: Cell, samples: int, rounds: int, alike: bool) -> Trained:
    torch.set_num_threads(1)
    multiprocessing.current_process().name = "MainProcess"  # in another one, pfl does not join the group of processes
    warnings.simplefilter("ignore", FutureWarning)  # that pfl uses a deprecated name of torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    moments: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *arguments: Any, **options: Any) -> tuple[bool, Metrics]:
            moments.append(time.perf_counter())
            return False, Metrics()

    users = [PyTorchTensorDataset(client) for client in clients_of(cell, samples, alike)]
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(range(cell.cohort)))
    learner = Learner(made(cell.model))
    local = functools.partial(torch.optim.SGD, momentum=RATES["momentum"], weight_decay=RATES["weight_decay"])
    with contextlib.redirect_stdout(io.StringIO()):
        FederatedAveraging().run(
            NNAlgorithmParams(rounds + 1, rounds + 1, cell.cohort, val_cohort_size=None),
            SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
            PyTorchModel(learner, local, torch.optim.SGD(learner.parameters(), lr=1.0)),
            NNTrainHyperParams(BATCH, local_num_epochs=1, local_learning_rate=RATES["lr"]),
            NNEvalHyperParams(BATCH),
            callbacks=[Clock()],
        )
    return [end - start for start, end in itertools.pairwise(moments)], weights_of(learner.net)


def train_fedjax(cell: Cell, samples: int, rounds: int, cores: int | None, alike: bool = False) -> Trained:
    """Train with FedJAX on so many cores, or on all."""
    if cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    import jax

    jax.tree_map = jax.tree_util.tree_map  # for FedJAX 0.0.17; new versions of jax have it only there
    import fedjax
    import haiku
    import optax

    net, data = made(cell.model), {}
    for client, (inputs, labels) in enumerate(clients_of(cell, samples, alike)):
        data[client] = {"x": inputs.permute(0, 2, 3, 1).contiguous().numpy(), "y": labels.int().numpy()}
    network = haiku.without_apply_rng(haiku.transform(lambda images: in_haiku(net)(images)))

    def loss(weights: Any, batch: Any, key: Any) -> Any:
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], network.apply(weights, batch["x"]))

    decay, sgd = optax.add_decayed_weights(RATES["weight_decay"]), optax.sgd(RATES["lr"], RATES["momentum"])
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.grad(loss),
        fedjax.optimizers.create_optimizer_from_optax(optax.chain(decay, sgd)),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(BATCH),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(fedjax.InMemoryFederatedData(data), cell.cohort, SEED)
    state, times = algorithm.init(jax.tree_util.tree_map(jax.numpy.array, weights_of(net))), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(algorithm.apply(state, sampler.sample()))
        times.append(time.perf_counter() - start)
    return times[1:], jax.tree_util.tree_map(np.asarray, state.params)


OURS: dict[str, tuple[Any, ...]] = {"bare": (run_bare,)} | {name: (run_federation, *run) for name, run in RUNS.items()}
PEERS: dict[str, tuple[Any, ...]] = {
    "pfl 1": (train_pfl, 1),
    "pfl 2": (train_pfl, 2),
    "fedjax": (train_fedjax, None),
    "fedjax, one core": (train_fedjax, 1),
}
"""Functions of the sides, and their last arguments."""


def compare(cell: Cell, samples: int, sides: list[str]) -> dict[str, float]:
    """Return how far the weights of each peer end from those of the plain loop; stop if that is too far."""
    bare, differences = apart(train_bare, cell, samples, 1), {}
    for side in sides:
        function, option = PEERS[side]
        found = apart(function, cell, samples, 1, option, True)[1]
        differences[side] = max(float(abs(found[name][key] - bare[name][key]).max()) for name in bare for key in "wb")
        if not differences[side] <= TOLERANCE:
            sys.exit(
                f"{cell.model}: the weights of `{side}` and of the plain loop differ by {differences[side]:.1e} after "
                f"two rounds; expected at most {TOLERANCE:.0e}, so their times cannot be compared."
            )
    return differences


def seconds(side: str, cell: Cell, samples: int, rounds: int) -> float:
    """Return the median wall time of the rounds of a run."""
    function, *options = {**OURS, **PEERS}[side]
    found = apart(function, cell, samples, rounds, *options)
    times = found[0] if side in PEERS else [time["wall"] for time in found]
    return round(statistics.median(times), 5)


def measure(cell: Cell, samples: int, rounds: int, cycles: int, sides: list[str]) -> dict[str, Any]:
    """Measure the sides; return the seconds of their rounds in each cycle, and the medians of their ratios."""
    row: dict[str, Any] = {"model": cell.model, "cohort": cell.cohort, "samples": samples}
    row |= {"steps": -(-samples // BATCH), "rounds": rounds, "cycles": cycles}
    row["differences"] = compare(cell, samples, [side for side in sides if side in PEERS])
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for cycle in range(cycles):
        turn = cycle % len(sides)
        for side in sides[turn:] + sides[:turn]:
            taken[side].append(seconds(side, cell, samples, rounds))
    ratios = {side: [own / bare for own, bare in zip(taken[side], taken["bare"], strict=True)] for side in sides}
    row |= {"load": round(os.getloadavg()[0], 1), "seconds": taken}
    row["ratios"] = {side: round(statistics.median(values), 3) for side, values in ratios.items()}
    return row


def version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Compare and measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SAMPLES, default=list(SAMPLES), help="models")
    parser.add_argument("--sides", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS], help="sides")
    parser.add_argument("--cohort", type=int, default=10, help="number of clients, all of them in each round")
    parser.add_argument("--samples", type=int, help="number of samples of a client; by default 500, and 200 of LeNet5")
    parser.add_argument("--rounds", type=int, default=8, help="number of measured rounds of a run")
    parser.add_argument("--cycles", type=int, default=5, help="number of runs of each side")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    versions = {peer: {name: version(name) for name in names} for peer, names in NEEDED.items()}
    missing = [peer for peer, found in versions.items() if None in found.values()]
    for peer in missing:
        lacking = ", ".join(name for name, found in versions[peer].items() if found is None)
        print(f"`{peer}` is left out, since these are not installed: {lacking}.", file=sys.stderr)
    sides = [side for side in dict.fromkeys(["bare", *options.sides]) if not side.startswith(tuple(missing))]
    result: dict[str, Any] = {
        **machine(),
        "peers": versions,
        "batch": BATCH,
        "left_out": missing,
        "cells": [],
    }
    for model in options.models:
        cell = Cell(model, "even", "FedAvg", options.cohort, options.cohort)
        size = options.samples or SAMPLES[model]
        result["cells"].append(measure(cell, size, options.rounds, options.cycles, sides))
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
