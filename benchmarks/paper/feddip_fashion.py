"""FedDIP (arXiv:2309.06805), Table III and Figure 6, on Fashion-MNIST: LeNet-5, IID, 50 clients, 5 a round, 5 epochs.

All methods of the table, and FedDIP at the densities .05 and .01 of Figure 6; 200 rounds, with three seeds for the
table's methods but FedDST and for FedDIP without the return of pruned weights, then the paper's 1000 rounds once. The
schedules of density and penalty span the run, whatever its length. Every round is evaluated: the last one, as every
fifth, ends with a mask that has not been trained yet, the best one need not. Figure 2 is the curves of these runs, and
Figure 5 the layers' densities of FedDIP, which the masks of a run folder hold (``sparsefl report``).

    python benchmarks/paper/feddip_fashion.py --data DIR [--only 'feddip-T200-*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent, seconds_a_round

NEVER = ("--algorithm.recover", "false")
RESCALE = ("--algorithm.rescale", "true")
LARGEST = ("--algorithm.first", "magnitude")
STRONG = ("--algorithm.strength", "0.1")
"""The strongest penalty of the grid that the paper searches."""
METHODS = {
    "fedavg": ("FedAvg", "89.50 (0.09)", "table3/fashion_mnist_fedavg", ()),
    "feddip": ("FedDIP", "88.26 (0.09)", "table3/fashion_mnist_feddip", ()),
    "feddip-never": ("FedDIP, `recover: false`", "88.26 (0.09)", "table3/fashion_mnist_feddip", NEVER),
    "feddp": ("FedDP", "88.06 (0.08)", "table3/fashion_mnist_feddp", ()),
    "prunefl": ("PruneFL", "86.00 (0.10)", "table3/fashion_mnist_prunefl", ()),
    "snip": ("SNIP", "86.08 (0.15)", "table3/fashion_mnist_snip", ()),
    "prunetrain": ("PruneTrain", "84.36 (0.10)", "table3/fashion_mnist_prunetrain", ()),
    "prunetrain-.1": ("PruneTrain, `strength: 0.1`", "-", "table3/fashion_mnist_prunetrain", STRONG),
    "feddst": ("FedDST", "80.37 (0.20)", "table3/fashion_mnist_feddst", ()),
    "feddst-magnitude": ("FedDST, `first: magnitude`", "-", "table3/fashion_mnist_feddst", LARGEST),
    "feddst-rescale": ("FedDST, `rescale: true`", "-", "table3/fashion_mnist_feddst", RESCALE),
    "feddip-.05": ("FedDIP, density .05 (Fig. 6)", "-", "figure6/fashion_mnist_density0.05", ()),
    "feddip-.01": ("FedDIP, density .01 (Fig. 6)", "-", "figure6/fashion_mnist_density0.01", ()),
}
"""Label, the paper's accuracy after 1000 rounds and its standard deviation in percent, cell, further options."""
SEEDED = ("fedavg", "feddip", "feddip-never", "feddp", "snip", "prunetrain", "prunefl")
"""Methods with three seeds at T 200."""
EXPLAINING = ("feddst-magnitude", "feddst-rescale", "prunetrain-.1")
"""Methods that explain a row, and run at T 200 only."""
PAPERS = [method for method in METHODS if method not in EXPLAINING]


def run(method: str, rounds: int, seed: int = 0) -> Run:
    """Return a run.

    Args:
        method: Key of `METHODS`.
        rounds: Number of rounds (T).
        seed: Random seed of the run.
    """
    *_, cell, options = METHODS[method]
    length = ("--trainer.max_rounds", str(rounds))
    few = ("--federation.eval_clients", "1", "--federation.checkpoint_every_n_rounds", "10")
    name, config = f"{method}-T{rounds}", f"paper/feddip/{cell}.yaml"
    return Run(name, config, seed, (*length, *few, *options), engine="stacked")


RUNS = [
    *(run(method, 200) for method in METHODS),
    *(run(method, 200, seed) for seed in (1, 2) for method in SEEDED),
    *(run(method, 1000) for method in PAPERS),
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: per length and method, accuracies beside the paper's, what was sent and computed, the time."""
    lines = []
    for rounds, methods in ((1000, PAPERS), (200, METHODS)):
        for method in methods:
            label, paper, *_ = METHODS[method]
            own = of(rows, f"{method}-T{rounds}")
            accuracies = (paper if rounds == 1000 else "-", percent(own), percent(own, "best"))
            counts = [mean(own, column, scale) for column, scale in _COUNTS]
            lines.append((label, rounds, len(own), *accuracies, *counts, seconds_a_round(own)))
    head = ("method", "T", "seeds", "paper, %", "final, %", "best, %", "MB down", "MB up", "TFLOP", "s a round")
    return markdown(head, lines)


_COUNTS = (("bytes_down", 1e6), ("bytes_up", 1e6), ("flops_train", 1e12))

if __name__ == "__main__":
    main(RUNS, "feddip_fashion", table)
