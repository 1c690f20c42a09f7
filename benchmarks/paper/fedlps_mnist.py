"""FedLPS (arXiv:2412.07216), Tables I and II, on MNIST: 2 classes a client, 10 of 100 clients a round, 100 rounds.

Seeds 0, 1 and 2 of FedAvg, FedProx, FedSpa, FedLPS and its ablations: the source of the density (the bandit, the
capacity, or .5 for all), capacities that are fixed or drawn anew in every round, and at density .5 the pattern of kept
units. FedLPS and FLST are also run as printed, with mu = lambda = 1 on sums of squares, and FedLPS with the options
that approximate the authors' program. All other rows have the defaults.

    python benchmarks/paper/fedlps_mnist.py --data DIR [--only 'fedlps*-seed0']

One command runs all of them, in the order of the seeds. Each finished run is a row of the CSV and is skipped from then
on; a run that was stopped continues from its last checkpoint. To run a row again, delete it and its run folder.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _runs import REPOSITORY, Row, Run, main, markdown, percent

SUM = ("--algorithm.reduction", "sum")
DENSE_SECONDS = 3 * 5 * 192 * 968.1e3 / 727e9
"""Of a dense round of a device of capacity 1: 5 epochs of 180 samples, counted as 192 in batches of 32."""
PUBLISHED = (
    *("--config", str(REPOSITORY / "configs/paper/fedlps/as_published_code.yaml")),
    *("--algorithm.time_unit", f"{DENSE_SECONDS:.4e}"),
)
METHODS = {
    "fedavg": ("FedAvg", "88.15 (1.14)", "2.8", "table1/mnist_fedavg", ()),
    "fedprox": ("FedProx", "87.53 (1.16)", "2.8", "table1/mnist_fedprox", ()),
    "fedspa": ("FedSpa, density .5", "93.94 (0.85)", "1.4", "table1/mnist_fedspa", ()),
    "fedlps": ("FedLPS (P-UCBV, Dyn)", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", ()),
    "fedlps-fix": ("FedLPS (P-UCBV, Fix)", "95.72 (0.26)", "0.9", "table2/mnist_pucbv_fix", ()),
    "rcr-dyn": ("RCR, Dyn", "95.99 (0.12)", "1.1", "table2/mnist_rcr_dyn", ()),
    "rcr-fix": ("RCR, Fix", "94.95 (0.20)", "1.1", "table2/mnist_rcr_fix", ()),
    "flst": ("FLST", "94.76 (0.06)", "1.4", "table2/mnist_flst", ()),
    "fedlps-published": ("FedLPS, `as_published_code`", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", PUBLISHED),
    "fedlps-sum": ("FedLPS, `reduction: sum`", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", SUM),
    "flst-sum": ("FLST, `reduction: sum`", "94.76 (0.06)", "1.4", "table2/mnist_flst", SUM),
    **{
        f"flst-{pattern}": (f"FLST, {pattern}", "-", "-", "table2/mnist_flst", ("--algorithm.pattern", pattern))
        for pattern in ("magnitude", "ordered", "random", "rolling")
    },
}
"""Label, the paper's accuracy and its deviation in percent, its TFLOP, cell, further options."""
FEW = ("--trainer.check_val_every_n_round", "20", "--federation.checkpoint_every_n_rounds", "10")
RUNS = [
    Run(method, f"paper/fedlps/{cell}.yaml", seed, (*FEW, *options), metric="personal/test_acc")
    for seed in range(3)
    for method, (*_, cell, options) in METHODS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracy and FLOPs beside the paper's, bytes, and the devices' simulated time."""
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
