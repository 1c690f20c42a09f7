"""FedSpa (arXiv:2201.11380), Table 1, on EMNIST-Letters: LeNet5, 100 clients, 10 a round, Dirichlet 0.2 and 0.1.

All methods of the table in its settings A (0.2) and B (0.1), and the ablations of Figures 6 and 7: first masks that
differ by client, and growth at random. 100 rounds, with three seeds for FedAvg and FedSpa in setting B, then the
paper's 400 rounds once, as stacks, which take three quarters of the time. The learning rate is multiplied by 0.998 in
each round as in the paper; the exchange rate of FedSpa decays to zero over the rounds of the run.

    python benchmarks/paper/fedspa_emnist.py --data DIR [--only 'b-fedspa*-T100-*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent, seconds_a_round

DIFFERENT = ("--algorithm.mask_init", "different")
METHODS = {
    "fedspa_dst": ("FedSpa, searched masks", "95.3 (0.1)", "96.5 (0.2)", "fedspa_dst", ()),
    "fedavg": ("FedAvg", "92.3 (0.3)", "90.9 (0.8)", "fedavg", ()),
    "fedspa_static": ("FedSpa, static masks", "91.9 (0.2)", "90.6 (0.9)", "fedspa_static", ()),
    "local": ("Local", "87.8 (0.1)", "91.6 (0.5)", "local", ()),
    "ditto": ("Ditto", "95.9 (0.1)", "97.0 (0.2)", "ditto", ()),
    "sub_fedavg": ("Sub-FedAvg", "94.9 (0.2)", "96.4 (0.2)", "sub_fedavg", ()),
    "subsampling": ("Subsampling", "92.0 (0.4)", "91.3 (0.6)", "subsampling", ()),
    "fedspa_dst-different": ("FedSpa, searched, different first masks", "-", "-", "fedspa_dst", DIFFERENT),
    "fedspa_static-different": ("FedSpa, static, different masks", "-", "-", "fedspa_static", DIFFERENT),
    "fedspa_dst-random": ("FedSpa, random growth", "-", "-", "fedspa_dst", ("--algorithm.growth", "random")),
}
"""Label, the paper's accuracy after 400 rounds in percent in settings A and B, cell, further options."""
SETTINGS = {"b": "B (0.1)", "a": "A (0.2)"}
SEEDED = ("fedspa_dst", "fedavg")
"""Methods with three seeds in setting B."""


def run(setting: str, method: str, rounds: int, seed: int = 0) -> Run:
    """Return a run.

    Args:
        setting: Key of `SETTINGS`.
        method: Key of `METHODS`.
        rounds: Number of rounds.
        seed: Random seed of the run.
    """
    *_, cell, options = METHODS[method]
    length = ("--trainer.max_rounds", str(rounds), "--trainer.check_val_every_n_round", "10")
    return Run(
        f"{setting}-{method}-T{rounds}",
        f"paper/fedspa/table1/emnist_letters_{setting}_{cell}.yaml",
        seed,
        (*length, "--federation.checkpoint_every_n_rounds", "5", *options),
        metric="personal/test_acc",
        engine="fast" if rounds == 100 else "stacked",
    )


RUNS = [
    *(run(setting, method, 100) for setting in SETTINGS for method in METHODS),
    *(run("b", method, 100, seed) for seed in (1, 2) for method in SEEDED),
    *(run(setting, method, 400) for setting in SETTINGS for method in METHODS),
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracy of the personal models beside the paper's, bytes and FLOPs after 100 rounds, time."""
    lines = []
    for place, (setting, name) in enumerate(sorted(SETTINGS.items())):
        for method, (label, *papers, _, _) in METHODS.items():
            short, long = (of(rows, f"{setting}-{method}-T{rounds}") for rounds in (100, 400))
            counts = [mean(short, column, scale) for column, scale in (("bytes_paper", 1e9), ("flops_paper", 1e14))]
            accuracies = (papers[place], percent(long), percent(short), percent(short, "best"))
            lines.append((label, name, *accuracies, len(short), *counts, seconds_a_round(short)))
    head = ("method", "setting", "paper, 400 rounds, %", "400 rounds, %", "100 rounds, %", "best of 100, %", "seeds")
    return markdown((*head, "GB", "1e14 FLOPs", "s a round"), lines)


if __name__ == "__main__":
    main(RUNS, "fedspa_emnist", table)
