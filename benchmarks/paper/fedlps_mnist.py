"""FedLPS (arXiv:2412.07216), Tables I and II, on MNIST: 2 classes a client, 10 of 100 clients a round, 100 rounds.

FedAvg, FedSpa, FedLPS and its ablations: the choice of the density (bandit, capacity, or .5 for all), capacities that
are fixed or drawn in every round, and the choice of units at density .5. FedLPS and FLST also run as published,
where mu and lambda are 1 and multiply sums of squares; all others have `reduction: mean`.

    python benchmarks/paper/fedlps_mnist.py --data DIR [--only 'fedlps*']
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _runs import Row, Run, main, markdown, percent

MEAN = ("--algorithm.reduction", "mean")
METHODS = {
    "fedavg": ("FedAvg", "88.15 (1.14)", "2.8", "table1/mnist_fedavg", ()),
    "fedspa": ("FedSpa, density .5", "93.94 (0.85)", "1.4", "table1/mnist_fedspa", ()),
    "fedlps": ("FedLPS as printed", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", ()),
    "fedlps-mean": ("FedLPS, `reduction: mean`", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", MEAN),
    "flst": ("FLST as printed", "94.76 (0.06)", "1.4", "table2/mnist_flst", ()),
    "flst-mean": ("FLST", "94.76 (0.06)", "1.4", "table2/mnist_flst", MEAN),
    "rcr-dyn": ("RCR, Dyn", "95.99 (0.12)", "1.1", "table2/mnist_rcr_dyn", MEAN),
    "rcr-fix": ("RCR, Fix", "94.95 (0.20)", "1.1", "table2/mnist_rcr_fix", MEAN),
    "fedlps-fix": ("P-UCBV, Fix", "95.72 (0.26)", "0.9", "table2/mnist_pucbv_fix", MEAN),
    **{
        f"flst-{pattern}": (f"FLST, {pattern}", "-", "-", "table2/mnist_flst", (*MEAN, "--algorithm.pattern", pattern))
        for pattern in ("magnitude", "ordered", "random", "rolling")
    },
}
"""Label, the paper's accuracy (standard deviation) in percent and TFLOP, configuration and further options of each."""
FEW = ("--trainer.check_val_every_n_round", "20", "--federation.checkpoint_every_n_rounds", "10")
RUNS = [
    Run(method, f"paper/fedlps/{cell}.yaml", seed, (*FEW, *options), metric="personal/test_acc")
    for seed in range(3)
    for method, (*_, cell, options) in METHODS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Create the table: for each method, accuracy and FLOPs beside the paper's, bytes, and simulated time."""
    lines = []
    for method, (label, paper, flops, _, _) in METHODS.items():
        own = [row for row in rows if row["run"] == method]
        counts = [_mean(own, column, scale) for column, scale in _COUNTS]
        lines.append((label, len(own), paper, percent(own), flops, *counts))
    counted = ("TFLOP as there", "TFLOP of what is left", "MB up", "simulated s")
    return markdown(("method", "seeds", "paper, %", "personal, %", "paper, TFLOP", *counted), lines)


def _mean(rows: Sequence[Row], column: str, scale: float) -> str:
    values = [float(row[column]) / scale for row in rows if row[column]]
    return f"{statistics.fmean(values):.2f}" if values else "-"


_COUNTS = (("flops_paper", 1e12), ("flops_train", 1e12), ("bytes_up", 1e6), ("simulated", 1.0))

if __name__ == "__main__":
    main(RUNS, "fedlps_mnist", table)
