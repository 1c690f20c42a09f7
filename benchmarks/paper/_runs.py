"""What the scripts of this folder share: runs of ``sparsefl fit``, a row of a CSV for each that has finished.

A script lists its runs and hands them to :func:`main`. A run that was stopped goes on where it was committed last, one
that has its row is not started again, so a script can be killed and called again until its table is full.
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
"""Accuracies in [0, 1] of the followed metric: after the last round, the best, the mean of the best five; before and
after fine-tuning, where there was some. Bytes and FLOPs of the whole run; seconds of its rounds, without scoring, on
the devices that the method simulates and on the machine that it ran on."""
_COUNTS = {
    "bytes_down": "comm/downlink_bytes_total",
    "bytes_up": "comm/uplink_bytes_total",
    "bytes_paper": "comm/paper_bytes_total",
    "flops_train": "flops/train_total",
    "flops_paper": "flops/paper_total",
    "density": "sparsity/density",
}
Row = Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One run of ``sparsefl fit``."""

    name: str
    """What the table calls it; with the seed it is unique."""
    config: str
    """A file under ``configs/``."""
    seed: int = 0
    """Of the run."""
    options: tuple[str, ...] = ()
    """Further arguments of the command line."""
    metric: str = "global/test_acc"
    """The key of ``metrics.csv`` that is followed."""

    @property
    def key(self) -> str:
        """Name and seed."""
        return f"{self.name}-seed{self.seed}"

    def command(self, folder: Path, data: str) -> list[str]:
        """The command line.

        Args:
            folder: For the run folders of all runs.
            data: The folder that holds the data sets.
        """
        arguments = ["--config", str(REPOSITORY / "configs" / self.config), "--seed_everything", str(self.seed)]
        arguments += ["--trainer.default_root_dir", str(folder / self.key), "--trainer.enable_progress_bar", "false"]
        arguments += ["--data.root", data] if data else []
        if any((folder / self.key).glob("*/version_*/checkpoints/last.ckpt")):
            arguments += ["--ckpt_path", "last"]
        return [sys.executable, "-m", "lightning_sparsefl.cli", "fit", *arguments, *self.options]

    def row(self, folder: Path, commit: str) -> dict[str, object]:
        """What the newest run folder says.

        Args:
            folder: For the run folders of all runs.
            commit: Of the code.
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
    """The command line of a script.

    Args:
        runs: In the order in which they should be started.
        name: Of the CSV file.
        table: Makes the document's table of the rows.
        argv: Instead of the command line's.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="*", help="runs whose name and seed match the pattern")
    parser.add_argument("--data", default=os.environ.get("SPARSEFL_DATA", "data"), help="folder of the data sets")
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="for the run folders")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.csv", help="the CSV")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--table", action="store_true", help="put the CSV's table into docs/results.md, run nothing")
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
    """The runs that match a pattern and have no row yet."""
    done = {(row["run"], row["seed"]) for row in rows}
    return [run for run in runs if fnmatchcase(run.key, only) and (run.name, str(run.seed)) not in done]


def read(path: Path) -> list[Row]:
    """The rows of a table; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Mapping[str, object]) -> None:
    """Add a row; older rows that lack a column have nothing there."""
    rows = [*read(path), row]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")  # so that a kill while writing loses no row
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def commit() -> str:
    """The hash of the code that runs, marked where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout

    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if git("status", "--porcelain").strip() else "")


def with_table(text: str, name: str, table: str) -> str:
    """A document with the table between its two marks replaced.

    Args:
        text: Of the document.
        name: Of the marks ``<!-- name -->`` and ``<!-- /name -->``.
        table: The new one.
    """
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, mark, after = rest.partition(f"<!-- /{name} -->")
    return f"{before}<!-- {name} -->\n{table}\n{mark}{after}"


def percent(rows: Sequence[Row], column: str = "final") -> str:
    """Mean of a column in percent, with the standard deviation if there are several rows; a dash without rows.

    Args:
        rows: Of one method.
        column: An accuracy.
    """
    values = [100 * float(row[column]) for row in rows]
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" ({statistics.stdev(values):.2f})" if len(values) > 1 else "")


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table: the first column to the left, the others to the right."""
    rule = "|---|" + "--:|" * (len(head) - 1)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
