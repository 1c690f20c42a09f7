"""FedDIP (arXiv:2309.06805), Table III, on Fashion-MNIST: LeNet-5, IID, 50 clients, 5 a round, 5 epochs.

The paper's 1000 rounds once for FedAvg and FedDIP, and 200 rounds with three seeds for FedAvg, FedDP, and FedDIP with
and without the return of pruned weights. The schedules of density and penalty span the run, whatever its length. Every
round is evaluated: the last one, as every fifth, ends with a mask that has not been trained yet, the best one need not.

    python benchmarks/paper/feddip_fashion.py --data DIR [--only 'feddip-T200-*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _runs import Row, Run, main, markdown, percent

METHODS = {
    "fedavg": ("FedAvg", "fedavg", ()),
    "feddip": ("FedDIP", "feddip", ()),
    "feddp": ("FedDP", "feddp", ()),
    "feddip-never": ("FedDIP, `recover: false`", "feddip", ("--algorithm.recover", "false")),
}
"""Label, cell, further options."""
PAPER = {("fedavg", 1000): "89.50 (0.09)", ("feddip", 1000): "88.26 (0.09)", ("feddp", 1000): "88.06 (0.08)"}
"""Accuracy and its standard deviation in percent."""


def run(method: str, rounds: int, seed: int) -> Run:
    """Return a run.

    Args:
        method: Key of `METHODS`.
        rounds: Number of rounds (T).
        seed: Random seed of the run.
    """
    _, cell, options = METHODS[method]
    length = ("--trainer.max_rounds", str(rounds))
    few = ("--federation.eval_clients", "1", "--federation.checkpoint_every_n_rounds", "10")
    config = f"paper/feddip/table3/fashion_mnist_{cell}.yaml"
    return Run(f"{method}-T{rounds}", config, seed, (*length, *few, *options))


RUNS = [
    *(run(method, 200, seed) for seed in range(3) for method in METHODS),
    *(run(method, 1000, 0) for method in ("fedavg", "feddip")),
]


def table(rows: Sequence[Row]) -> str:
    """Per method and length: accuracies beside the paper's, what was sent and computed, and the time."""
    lines = []
    for rounds in (1000, 200):
        for method, (label, _, _) in METHODS.items():
            own = [row for row in rows if row["run"] == f"{method}-T{rounds}"]
            paper = PAPER.get((method, rounds), "-")
            if own or paper != "-":
                first = own[0] if own else None
                counts = (
                    [f"{float(first[key]) / scale:.2f}" for key, scale in _COUNTS] if first else ["-"] * len(_COUNTS)
                )
                seconds = f"{sum(float(row['seconds']) for row in own) / (rounds * len(own)):.1f}" if own else "-"
                cells = (label, rounds, len(own), paper, percent(own), percent(own, "best"), *counts, seconds)
                lines.append(cells)
    head = ("method", "T", "seeds", "paper, %", "final, %", "best, %", "MB down", "MB up", "TFLOP", "s a round")
    return markdown(head, lines)


_COUNTS = (("bytes_down", 1e6), ("bytes_up", 1e6), ("flops_train", 1e12))

if __name__ == "__main__":
    main(RUNS, "feddip_fashion", table)
