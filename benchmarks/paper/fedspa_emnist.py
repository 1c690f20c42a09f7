"""FedSpa (arXiv:2201.11380), Table 1, on EMNIST-Letters, setting B (Dirichlet 0.1): LeNet5, 100 clients, 10 a round.

The first 100 of the paper's 400 rounds for FedAvg, Local, and FedSpa with searched and with static masks. The learning
rate is multiplied by 0.998 in each round as in the paper; the exchange rate of FedSpa decays to zero over these rounds.

    python benchmarks/paper/fedspa_emnist.py --data DIR [--only 'fedspa*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _runs import Row, Run, main, markdown, percent

METHODS = {
    "fedavg": ("FedAvg", "90.9"),
    "local": ("Local", "91.6"),
    "fedspa_dst": ("FedSpa, searched masks", "96.5"),
    "fedspa_static": ("FedSpa, static masks", "90.6"),
}
"""Label, and the paper's accuracy after 400 rounds in percent."""
ROUNDS = 100
RUNS = [
    Run(
        method,
        f"paper/fedspa/table1/emnist_letters_b_{method}.yaml",
        options=(
            *("--trainer.max_rounds", str(ROUNDS), "--trainer.check_val_every_n_round", "10"),
            *("--federation.checkpoint_every_n_rounds", "5"),
        ),
        metric="personal/test_acc",
    )
    for method in METHODS
]


def table(rows: Sequence[Row]) -> str:
    """Create the table: for each method, accuracy of the personal models beside the paper's, bytes, FLOPs, time."""
    lines = []
    for method, (label, paper) in METHODS.items():
        own = [row for row in rows if row["run"] == method]
        counts = [f"{float(own[0][key]) / scale:.2f}" for key, scale in _COUNTS] if own else ["-"] * len(_COUNTS)
        seconds = f"{float(own[0]['seconds']) / ROUNDS:.1f}" if own else "-"
        lines.append((label, paper, percent(own), percent(own, "best"), *counts, seconds))
    head = ("method", "paper, 400 rounds, %", f"{ROUNDS} rounds, %", "best, %", "GB", "PFLOP", "s a round")
    return markdown(head, lines)


_COUNTS = (("bytes_paper", 1e9), ("flops_paper", 1e15))

if __name__ == "__main__":
    main(RUNS, "fedspa_emnist", table)
