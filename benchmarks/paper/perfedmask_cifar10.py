"""PerFedMask (Setayesh et al., ICLR 2023) on CIFAR-10: 3 classes a client, 10 of 100 a round, half of them weak.

The paper's Table 1 at c = 0.1, with a network that two cores can train: five convolutions (103,000 parameters) in the
place of PreResNet18. Three ways of choosing who trains which layers, against FedBABU and FedAvg, whose clients are all
strong.
The round with the best validation accuracy is fine-tuned; every round is a candidate, as in the paper.

    python benchmarks/paper/perfedmask_cifar10.py --data DIR [--only 'perfedmask*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _runs import Row, Run, main, markdown, percent

METHODS = {
    "fedavg": ("FedAvg", "71.19", "fedavg", ()),
    "fedbabu": ("FedBABU", "84.27", "fedbabu", ()),
    "optimized": ("PerFedMask, optimized", "83.60", "perfedmask", ()),
    "random": ("PerFedMask, random", "-", "perfedmask", ("--algorithm.masking", "random")),
    "sequential": ("PerFedMask, sequential", "-", "perfedmask", ("--algorithm.masking", "sequential")),
}
"""Label, the paper's accuracy after fine-tuning in percent, cell, further options."""
NETWORK = (
    *("--model", "SmallCNN", "--model.width", "8", "--model.depth", "5", "--model.norm", "batch_static"),
    *("--model.lr", "0.1", "--model.momentum", "0.9", "--model.weight_decay", "5e-4"),
)
RUNS = [
    Run(
        method,
        f"paper/perfedmask/table1/cifar10_c0.1_{cell}.yaml",
        seed,
        (*NETWORK, "--federation.checkpoint_every_n_rounds", "4", *options),
        metric="personal/test_acc",
    )
    for seed in range(3)
    for method, (_, _, cell, options) in METHODS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Per method: accuracies before and after fine-tuning beside the paper's, what was sent and computed, the time."""
    lines = []
    for method, (label, paper, _, _) in METHODS.items():
        own = [row for row in rows if row["run"] == method]
        counts = [f"{float(own[0][key]) / scale:.2f}" for key, scale in _COUNTS] if own else ["-"] * len(_COUNTS)
        lines.append((label, len(own), paper, percent(own, "before"), percent(own, "after"), *counts))
    head = ("method", "seeds", "paper, after, %", "before, %", "after, %", "MB up", "TFLOP")
    return markdown(head, lines)


_COUNTS = (("bytes_up", 1e6), ("flops_train", 1e12))

if __name__ == "__main__":
    main(RUNS, "perfedmask_cifar10", table)
