"""Overhead of a client's local fit over a plain PyTorch loop: LeNet5 (Caffe), batches of 20, one thread.

Both sides take the same batches from one loader, in turns within a cycle, and must end with the same weights. The ratio
is the median over the cycles of our CPU time divided by that of the plain loop. With logging, our side logs loss and
accuracy in each step (``on_step=False, on_epoch=True``), and is compared with the plain loop and with one that sums
both.

    python benchmarks/local_trainer.py --out result.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.models import LeNet5

BATCH, RATES = 20, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


class Silent(LeNet5):
    """LeNet5 that does not log."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        inputs, targets = batch
        return cross_entropy(self(inputs), targets)


def bare(net: nn.Module, loader: Any, sums: bool) -> None:
    """Train one epoch in a plain loop.

    Args:
        net: Network; changed in place.
        loader: Loader of the batches.
        sums: Whether to sum the loss and the number of correct predictions.
    """
    optimizer = torch.optim.SGD(net.parameters(), **RATES)
    total_loss = total_correct = torch.zeros(())
    for inputs, targets in loader:
        optimizer.zero_grad()
        logits = net(inputs)
        loss = cross_entropy(logits, targets)
        if sums:
            total_loss = total_loss + loss.detach() * len(targets)
            total_correct = total_correct + (logits.argmax(1) == targets).sum()
        loss.backward()
        optimizer.step()


def seconds(work: Callable[[], object]) -> float:
    """Run a function and return its CPU time in seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(kind: type[LeNet5], sums: bool, steps: int, cycles: int) -> dict[str, float]:
    """Compare the two sides by medians over the cycles.

    Args:
        kind: Class of the module, with or without logging.
        sums: Whether the plain loop sums loss and accuracy.
        steps: Number of steps of an epoch.
        cycles: Number of cycles, in each of which the two sides take turns.
    """
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH * steps, 1, 28, 28, generator=rng)
    labels = torch.randint(10, (BATCH * steps,), generator=rng)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
    module = kind(num_classes=10, **RATES)
    net = copy.deepcopy(module.net)
    local = FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions())
    sides = [lambda: bare(net, loader, sums), lambda: local.fit(module, loader)]
    for side in sides:
        side()
    if any(not torch.equal(a, b) for a, b in zip(net.parameters(), module.net.parameters(), strict=True)):
        sys.exit("The weights of the two sides differ; expected equal weights, so their times cannot be compared.")
    times = []
    for cycle in range(cycles):
        taken = {index: seconds(sides[index]) for index in ((0, 1) if cycle % 2 else (1, 0))}
        times.append((taken[0], taken[1]))
    return {
        "bare_us_per_step": statistics.median(theirs for theirs, _ in times) / steps * 1e6,
        "local_us_per_step": statistics.median(ours for _, ours in times) / steps * 1e6,
        "ratio": statistics.median(ours / theirs for theirs, ours in times),
    }


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="number of steps of a fit")
    parser.add_argument("--cycles", type=int, default=20, help="number of cycles")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = {"steps": arguments.steps, "cycles": arguments.cycles}
    result = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        **size,
        "without_logging": compare(Silent, sums=False, **size),
        "with_logging": compare(LeNet5, sums=False, **size),
        "with_logging_against_sums": compare(LeNet5, sums=True, **size),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
