"""Shared code of the scripts in this folder: runs of ``sparsefl fit``, with a CSV row for each finished run.

A script passes its list of runs to :func:`main`. An interrupted run is resumed from its last commit, and a run with a
row is skipped, so a script can be killed and started again until its table is complete.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "paper"
DOCUMENT = REPOSITORY / "docs" / "results.md"
COLUMNS = (
    *("run", "seed", "rounds", "final", "best", "best5", "before", "after", "bytes_down", "bytes_up", "bytes_paper"),
    *("flops_train", "flops_paper", "density", "simulated", "seconds", "commit"),
)
"""Columns of the CSV file. Accuracies are values of the metric in [0, 1]: after the last round, the best, the mean of
the best five, and before and after fine-tuning if there was any. Bytes and FLOPs are those of the whole run. Seconds
are those of the rounds without evaluation, on the simulated devices and on the machine of the run."""
_COUNTS = {
    "bytes_down": "comm/downlink_bytes_total",
    "bytes_up": "comm/uplink_bytes_total",
    "bytes_paper": "comm/paper_bytes_total",
    "flops_train": "flops/train_total",
    "flops_paper": "flops/paper_total",
    "density": "density/all",
}
Row = Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One run of ``sparsefl fit``."""

    name: str
    """Name of the run in the table; unique together with the seed."""
    config: str
    """Configuration file, relative to ``configs/``."""
    seed: int = 0
    """Random seed of the run."""
    options: tuple[str, ...] = ()
    """Further arguments of the command line."""
    metric: str = "global/test_acc"
    """Column of ``metrics.csv`` with the accuracy."""

    @property
    def key(self) -> str:
        """Name and seed of the run."""
        return f"{self.name}-seed{self.seed}"

    def command(self, folder: Path, data: str) -> list[str]:
        """Return the command of the run, which resumes it if it has been committed.

        Args:
            folder: Parent folder of the run folders of all runs.
            data: Folder of the data sets.
        """
        arguments = ["--config", str(REPOSITORY / "configs" / self.config), "--seed_everything", str(self.seed)]
        arguments += ["--trainer.default_root_dir", str(folder / self.key), "--trainer.enable_progress_bar", "false"]
        arguments += ["--data.root", data] if data else []
        if any((folder / self.key).glob("*/version_*/checkpoints/last.ckpt")):
            arguments += ["--ckpt_path", "last"]
        return [sys.executable, "-m", "lightning_sparsefl.cli", "fit", *arguments, *self.options]

    def row(self, folder: Path, commit: str) -> dict[str, object]:
        """Return the row of a finished run, from its newest run folder.

        Args:
            folder: Parent folder of the run folders of all runs.
            commit: Commit of the code.
        """
        newest = max((folder / self.key).glob("*/version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        summary = json.loads((newest / "summary.json").read_text())
        with (newest / "metrics.csv").open(newline="") as file:
            rounds = list(csv.DictReader(file))
        scores = [float(row[self.metric]) for row in rounds if row[self.metric]]
        simulated = [float(row["time/simulated"]) for row in rounds if row.get("time/simulated")]
        return {
            "run": self.name,
            "seed": self.seed,
            "rounds": summary["rounds"],
            "final": scores[-1],
            "best": max(scores),
            "best5": statistics.fmean(sorted(scores)[-5:]),
            "before": summary.get(f"selected/{self.metric.rpartition('/')[2]}", ""),
            "after": summary.get(f"finetuned/{self.metric.rpartition('/')[2]}", ""),
            **{column: summary[key] for column, key in _COUNTS.items()},
            "simulated": round(sum(simulated), 3) if simulated else "",
            "seconds": round(sum(float(row["time/round"]) for row in rounds), 1),
            "commit": commit,
        }


def main(
    runs: Sequence[Run], name: str, table: Callable[[Sequence[Row]], str], argv: Sequence[str] | None = None
) -> None:
    """Run the command line of a script.

    Args:
        runs: Runs, in the order in which they are started.
        name: Name of the CSV file.
        table: Function that creates the Markdown table from the rows.
        argv: Arguments; None for those of the command line.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern for the names and seeds of the runs")
    parser.add_argument("--data", default=os.environ.get("SPARSEFL_DATA", "data"), help="folder of the data sets")
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="parent folder of the run folders")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.csv", help="CSV file")
    parser.add_argument("--commit", default=None, help="commit of the code; default: that of git")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--table", action="store_true", help="only write the table of the CSV file to docs/results.md")
    options = parser.parse_args(argv)
    if options.table:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), name, table(read(options.out))))
        return
    for run in chosen(runs, options.only, read(options.out)):
        command = run.command(options.folder, options.data)
        print(" ".join(command), flush=True)
        if not options.list:
            subprocess.run(command, check=True)
            append(options.out, run.row(options.folder, options.commit or commit()))


def chosen(runs: Iterable[Run], only: str, rows: Iterable[Row]) -> list[Run]:
    """Return the runs that match a pattern and have no row yet."""
    done = {(row["run"], row["seed"]) for row in rows}
    return [run for run in runs if fnmatchcase(run.key, only) and (run.name, str(run.seed)) not in done]


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV file; empty if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Mapping[str, object]) -> None:
    """Add a row; columns that older rows lack are left empty."""
    rows = [*read(path), row]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")  # so that a kill while writing loses no row
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


_CODE = ("--", ".", f":!{RESULTS.relative_to(REPOSITORY)}", f":!{DOCUMENT.relative_to(REPOSITORY)}")
"""Arguments of git for everything but the rows and tables that a script of this folder writes."""


def commit() -> str:
    """Return the commit of the code, with a suffix if there are uncommitted changes other than these results."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout

    return git("rev-parse", "--short", "HEAD").strip() + (
        "-dirty" if git("status", "--porcelain", *_CODE).strip() else ""
    )


def with_table(text: str, name: str, table: str) -> str:
    """Replace the table between two marks of a document.

    Args:
        text: Text of the document.
        name: Name in the marks ``<!-- name -->`` and ``<!-- /name -->``.
        table: New table.
    """
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, mark, after = rest.partition(f"<!-- /{name} -->")
    return f"{before}<!-- {name} -->\n{table}\n{mark}{after}"


def percent(rows: Sequence[Row], column: str = "final") -> str:
    """Format the mean of a column in percent, with the standard deviation for several rows; a dash without rows.

    Args:
        rows: Rows of one method.
        column: Name of an accuracy column.
    """
    values = [100 * float(row[column]) for row in rows]
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" ({statistics.stdev(values):.2f})" if len(values) > 1 else "")


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Create a Markdown table with the first column left-aligned and the others right-aligned."""
    rule = "|---|" + "--:|" * (len(head) - 1)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
