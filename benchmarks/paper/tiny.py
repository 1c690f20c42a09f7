"""Three cells of a few seconds each, on the digits of scikit-learn, in double precision.

`tests/test_paper_runs.py` runs them again and compares them with the rows of the CSV. If a change of the package alters
them, the other rows of docs/results.md are out of date as well: delete these rows, run this script, and say in the
commit message what changed.

    python benchmarks/paper/tiny.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent

SHORT = (
    *("--trainer.max_rounds", "4", "--trainer.max_epochs", "2", "--trainer.precision", "64-true"),
    *("--trainer.logger", "false", "--trainer.check_val_every_n_round", "1"),
)
METHODS = {
    "fedspa": ("FedSpa", ()),
    "feddip": ("FedDIP", ("--algorithm", "FedDIP", "--algorithm.density", "0.2", "--algorithm.reconfigure_every", "2")),
    "fedlps": ("FedLPS", ("--algorithm", "FedLPS")),
}
"""Label and options."""
RUNS = [
    Run(name, "quickstart.yaml", 0, (*options, *SHORT), metric="personal/test_acc", has_files=False)
    for name, (_, options) in METHODS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracy, bytes and FLOPs after four rounds."""
    columns = (("bytes_up", 1e3), ("flops_train", 1e9))
    lines = [
        (label, percent(of(rows, name)), *(mean(of(rows, name), column, scale) for column, scale in columns))
        for name, (label, _) in METHODS.items()
    ]
    return markdown(("method", "personal, %", "kB up", "GFLOP"), lines)


if __name__ == "__main__":
    main(RUNS, "tiny", table)
