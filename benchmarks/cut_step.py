"""Time of a training step when units are cut out: ResNet18 at several densities, one thread.

Both sides run the same loop, one on the full network and one on a copy with the kept units only, as clients train with
`federation.execution: cut`. They take turns within a cycle. A ratio is the median over the cycles of the CPU time of
the narrow network divided by that of the full one; `flops` is the ratio of the FLOPs of the forward pass.

    python benchmarks/cut_step.py --out result.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl.cost import count_layers, forward_flops
from lightning_sparsefl.models import ResNet18
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups, keep_units, unit_counts, unit_masks, unit_norms

RATES = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Run one step and return its CPU time in seconds."""
    start = time.process_time()
    optimizer.zero_grad()
    cross_entropy(net(batch[0]), batch[1]).backward()
    optimizer.step()
    return time.process_time() - start


def compare(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], density: float, cycles: int) -> dict[str, float]:
    """Compare the full and the narrow network by medians over the cycles.

    Args:
        net: Full network.
        batch: Inputs and labels of each step.
        density: Fraction of the units that is kept; the units with the largest norms are kept.
        cycles: Number of cycles.
    """
    groups, weights = find_groups(net, batch[0][:1]), net.state_dict()
    kept = keep_units(unit_norms(groups, weights), unit_counts(groups, density))
    layers = count_layers(net, batch[0][:1])
    start = time.process_time()
    narrow = cut(net, groups, kept)
    cutting = time.process_time() - start
    sides = [(side, torch.optim.SGD(side.parameters(), **RATES)) for side in (net, narrow)]
    taken: list[list[float]] = [[], []]
    for cycle in range(cycles + 1):
        for index in (0, 1) if cycle % 2 else (1, 0):
            seconds = step(*sides[index], batch)
            if cycle:  # the first cycle allocates memory
                taken[index].append(seconds)
    return {
        "whole_ms": statistics.median(taken[0]) * 1e3,
        "narrow_ms": statistics.median(taken[1]) * 1e3,
        "cut_ms": cutting * 1e3,
        "ratio": statistics.median(small / large for large, small in zip(*taken, strict=True)),
        "flops": forward_flops(layers, unit_masks(groups, kept, weights)) / forward_flops(layers),
    }


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--densities", type=float, nargs="*", default=[0.5, 0.25, 0.125], help="densities of the units")
    parser.add_argument("--batch", type=int, default=32, help="batch size")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images in pixels")
    parser.add_argument("--cycles", type=int, default=8, help="number of cycles")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(arguments.batch, 3, arguments.size, arguments.size), torch.randint(10, (arguments.batch,))
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "batch": arguments.batch,
        "size": arguments.size,
        "cycles": arguments.cycles,
    }
    for density in arguments.densities:
        net = ResNet18(num_classes=10).net
        result[f"density_{density}"] = compare(net, batch, density, arguments.cycles)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
