"""PerFedMask (Setayesh et al., ICLR 2023) on CIFAR-10: 3 classes a client, 10 of 100 a round, half of them weak.

The paper's Table 1 at c = 0.1, with a network that two cores can train: five convolutions (103,000 parameters) in the
place of PreResNet18, and its Table 5: three ways of choosing who trains which layers. The weak clients of the other
methods train the whole model for half as many epochs. The last run, MobileNet with 10 classes, takes hours. The
round with the best validation accuracy is fine-tuned; every round is a candidate, as in the paper.

    python benchmarks/paper/perfedmask_cifar10.py --data DIR [--only 'optimized-*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent

NETWORK = (
    *("--model", "SmallCNN", "--model.width", "8", "--model.depth", "5", "--model.norm", "batch_static"),
    *("--model.lr", "0.1", "--model.momentum", "0.9", "--model.weight_decay", "5e-4"),
)
MOBILENET = ("--model", "MobileNet", "--model.num_classes", "10")
METHODS = {
    "fedavg": ("FedAvg", "71.19", "fedavg", NETWORK),
    "optimized": ("PerFedMask, optimized", "83.60", "perfedmask", NETWORK),
    "fedbabu": ("FedBABU", "84.27", "fedbabu", NETWORK),
    "random": ("PerFedMask, random", "-", "perfedmask", (*NETWORK, "--algorithm.masking", "random")),
    "sequential": ("PerFedMask, sequential", "-", "perfedmask", (*NETWORK, "--algorithm.masking", "sequential")),
    "fedprox": ("FedProx", "74.55", "fedprox", NETWORK),
    "fednova": ("FedNova", "71.88", "fednova", NETWORK),
    "mobilenet": ("PerFedMask, optimized, MobileNet", "-", "perfedmask", MOBILENET),
}
"""Label, the paper's accuracy after fine-tuning in percent, cell, further options."""
RUNS = [
    Run(
        method,
        f"paper/perfedmask/table1/cifar10_c0.1_{cell}.yaml",
        seed,
        ("--federation.checkpoint_every_n_rounds", "4", *options),
        metric="personal/test_acc",
    )
    for seed in range(3)
    for method, (_, _, cell, options) in METHODS.items()
    if method != "mobilenet" or seed == 0
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracies before and after fine-tuning beside the paper's, what was sent and computed."""
    lines = []
    for method, (label, paper, _, _) in METHODS.items():
        own = of(rows, method)
        counts = [mean(own, column, scale) for column, scale in _COUNTS]
        lines.append((label, len(own), paper, percent(own, "before"), percent(own, "after"), *counts))
    head = ("method", "seeds", "paper, after, %", "before, %", "after, %", "MB up", "TFLOP")
    return markdown(head, lines)


_COUNTS = (("bytes_up", 1e6), ("flops_train", 1e12))

if __name__ == "__main__":
    main(RUNS, "perfedmask_cifar10", table)
