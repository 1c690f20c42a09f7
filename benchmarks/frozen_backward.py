"""Time of the backward pass with frozen layers, compared with its FLOPs: MobileNet, one thread.

The plan of PerFedMask for 100 clients, half of which can train an eighth of the body, freezes most layers of the weak
clients. The backward pass of one batch is timed without frozen layers and with the plan, in turns within a cycle. The
expected share is that of the FLOPs: training FLOPs minus those of the forward pass. At a ratio of 1.0 the time falls as
the FLOPs do; at 1.15 it takes 15 percent longer.

    python benchmarks/frozen_backward.py --out result.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl.cost import count_layers, forward_flops, training_flops
from lightning_sparsefl.models import MobileNet
from lightning_sparsefl.sparse import freeze
from lightning_sparsefl.sparse.layer_groups import group_sizes, head_of, layer_groups

CLIENTS, WEAK = 100, 1 / 8
_LATE = 11
"""Index of the last group within the budget of a weak client, 268,800 parameters; all earlier layers are frozen."""


def plans(module: nn.Module) -> dict[str, set[str]]:
    """Return the frozen tensors of a weak client, of a client that trains one late group, and of FedBABU."""
    weights = dict(module.named_parameters())
    head = head_of(weights)
    groups = layer_groups({name: value for name, value in weights.items() if name not in head})
    sizes = group_sizes(weights, groups)
    budgets = [int(WEAK * sum(sizes))] * (CLIENTS // 2) + [sum(sizes)] * (CLIENTS // 2)
    weak = freeze.optimized(sizes, budgets, torch.Generator().manual_seed(0))[0].tolist()
    rows = {
        "weak": weak,
        "weak_late": [place == _LATE for place in range(len(sizes))],
        "fedbabu": [True] * len(sizes),
    }
    return {
        name: {*head, *(t for mine, names in zip(row, groups.values(), strict=True) if not mine for t in names)}
        for name, row in rows.items()
    }


def backward_seconds(module: nn.Module, frozen: set[str], images: Tensor, labels: Tensor) -> float:
    """Run one backward pass and return its CPU time in seconds."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
        parameter.grad = None
    loss = cross_entropy(module(images), labels)
    start = time.process_time()
    loss.backward()
    return time.process_time() - start


def promised(module: nn.Module, frozen: set[str]) -> float:
    """Compute the FLOPs of the backward pass as a fraction of those without frozen layers."""
    layers = count_layers(module, torch.zeros(1, 3, 32, 32))
    forward = forward_flops(layers)
    masks = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in module.named_parameters() if n in frozen}
    return (training_flops(layers, trainable=masks) - forward) / (training_flops(layers) - forward)


def measure(batch: int, cycles: int) -> dict[str, dict[str, float]]:
    """Measure all cases by medians over the cycles.

    Args:
        batch: Batch size.
        cycles: Number of cycles, in each of which the cases take turns.
    """
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=rng)
    labels = torch.randint(100, (batch,), generator=rng)
    torch.manual_seed(0)
    module = MobileNet()
    cases: dict[str, set[str]] = {"dense": set(), **plans(module)}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for cycle in range(-1, cycles):  # the first cycle is not counted
        for name in list(cases) if cycle % 2 else reversed(list(cases)):
            seconds = backward_seconds(module, cases[name], images, labels)
            if cycle >= 0:
                taken[name].append(seconds)
    results = {}
    for name, frozen in cases.items():
        share = statistics.median(mine / dense for mine, dense in zip(taken[name], taken["dense"], strict=True))
        results[name] = {
            "backward_ms": statistics.median(taken[name]) * 1e3,
            "share_of_dense": share,
            "share_promised": promised(module, frozen),
            "ratio": share / promised(module, frozen),
        }
    return results


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=50, help="batch size")
    parser.add_argument("--cycles", type=int, default=20, help="number of cycles")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = {"batch": arguments.batch, "cycles": arguments.cycles}
    result = {"machine": platform.machine(), "torch": torch.__version__, **size, **measure(**size)}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
