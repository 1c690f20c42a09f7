"""Cells that need a GPU: VGG11, ResNet18, PreResNet18, AlexNet and MobileNet on CIFAR, in the order of their value.

Each run is a file of `configs/paper/` as it is; the published accuracy is that of the file's header. `gpu.sh` runs them
on a machine without network. The rows say which device they ran on.

    python benchmarks/paper/gpu_cells.py --data DIR [--minutes 120]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent, published, seconds_a_round

PERSONAL = "personal/test_acc"
_FEDSPA = ("fedspa_dst", "fedavg", "fedspa_static", "ditto", "sub_fedavg", "local", "subsampling")
_FEDDIP = ("feddip", "fedavg", "feddp", "prunefl", "snip", "prunetrain", "feddst")
_PERFEDMASK = ("perfedmask", "fedbabu", "fedavg", "fedprox", "fednova", "heterofl", "splitmix")
CELLS = (
    *((f"perfedmask/table1/cifar10_c0.1_{method}", PERSONAL) for method in _PERFEDMASK),
    *((f"fedlps/table1/cifar10_{method}", PERSONAL) for method in ("fedlps", "fedavg", "fedspa", "heterofl", "fedper")),
    *((f"fedlps/table2/cifar10_{method}", PERSONAL) for method in ("flst", "rcr_dyn", "rcr_fix", "pucbv_fix")),
    *((f"fedspa/table1/cifar10_b_{method}", PERSONAL) for method in _FEDSPA),
    *((f"feddip/table3/cifar10_{method}", "global/test_acc") for method in _FEDDIP),
    *((f"perfedmask/table5/cifar100_{masking}", PERSONAL) for masking in ("optimized", "random", "sequential")),
    *((f"perfedmask/table1/cifar100_c0.1_{method}", PERSONAL) for method in _PERFEDMASK),
    *((f"fedspa/table1/cifar100_b_{method}", PERSONAL) for method in _FEDSPA),
    *((f"fedlps/table1/cifar100_{method}", PERSONAL) for method in ("fedlps", "fedavg", "fedspa")),
)
"""Cell and the column of its accuracy."""
FEW = ("--federation.checkpoint_every_n_rounds", "5")
RUNS = [Run(cell, f"paper/{cell}.yaml", 0, FEW, metric, engine="auto") for cell, metric in CELLS]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracies beside the paper's, bytes, FLOPs, time and device."""
    lines = []
    for run in RUNS:
        own = of(rows, run.name)
        accuracies = (published(run.config), percent(own), percent(own, "best"), percent(own, "after"))
        counts = [mean(own, column, scale) for column, scale in (("bytes_up", 1e9), ("flops_train", 1e15))]
        devices = ", ".join(sorted({row["device"] for row in own})) or "-"
        lines.append((f"`{run.name}`", *accuracies, *counts, seconds_a_round(own), devices))
    head = ("cell", "paper, %", "final, %", "best, %", "fine-tuned, %", "GB up", "PFLOP", "s a round", "device")
    return markdown(head, lines)


if __name__ == "__main__":
    main(RUNS, "gpu_cells", table)
