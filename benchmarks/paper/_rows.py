"""CSV files of finished runs, the commit and the machine of a row."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "paper"
DOCUMENT = REPOSITORY / "docs" / "results.md"
COLUMNS = (
    *("run", "seed", "rounds", "final", "best", "best5", "common", "before", "after", "bytes_down", "bytes_up"),
    *("bytes_paper", "flops_train", "flops_paper", "density", "simulated", "seconds"),
    *("engine", "device", "torch", "commit"),
)
"""Columns of the file of runs. Accuracies are values of the metric in [0, 1]: after the last round, the best, the mean
of the best five, that of the global model after the last round, and before and after fine-tuning if there was any.
Bytes and FLOPs are those of the whole run. Seconds are those of the rounds without evaluation, on the simulated devices
and on the machine of the run. `engine` is the local engine, `device` the GPU or the processor, `torch` its version."""
CURVE = ("run", "seed", "round", "accuracy", "bytes", "flops", "simulated")
"""Columns of the file of curves; rounds count from 0, and bytes (both ways), training FLOPs and simulated seconds are
totals up to the round."""
Row = Mapping[str, str]


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV file; empty if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
    """Add rows; columns that older rows lack are left empty."""
    everything = [*read(path), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")  # so that a kill while writing loses no row
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
    new.replace(path)


_CODE = ("--", ".", f":!{RESULTS.relative_to(REPOSITORY)}", f":!{DOCUMENT.relative_to(REPOSITORY)}")
"""Arguments of git for everything but the rows and tables that a script of this folder writes."""


def git(*arguments: str) -> str:
    """Return what a command of git prints in this repository."""
    run = subprocess.run(("git", *arguments), cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def commit() -> str:
    """Return the commit of the code, with a suffix if there are uncommitted changes other than these results."""
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", *_CODE) else "")


def device() -> str:
    """Return the name of the GPU, or of the processor if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    kinds = [
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "cpu family", "model\t"))
    ]
    return " ".join(dict.fromkeys(kinds)) or platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Return the columns of a row that describe the machine."""
    return {"device": device(), "torch": torch.__version__}


def data_folder() -> str:
    """Return the default folder of the data sets."""
    return os.environ.get("SPARSEFL_DATA", "data")
