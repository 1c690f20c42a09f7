"""Shared code of the scripts in this folder: runs of ``sparsefl fit``, with a CSV row for each finished run.

A script passes its list of runs to :func:`main`. An interrupted run is resumed from its last commit, and a run with a
row is skipped, so a script can be killed and started again until its table is complete.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from _rows import CURVE, DOCUMENT, REPOSITORY, RESULTS, Row, append, commit, data_folder, machine, read
from _tables import with_table

_COUNTS = {
    "bytes_down": "comm/downlink_bytes_total",
    "bytes_up": "comm/uplink_bytes_total",
    "bytes_paper": "comm/paper_bytes_total",
    "flops_train": "flops/train_total",
    "flops_paper": "flops/paper_total",
    "density": "density/all",
}
_POINTS = 25
"""Largest number of points of a curve."""


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
    engine: str = "fast"
    """Local engine: ``stacked`` where the method's clients train as a stack and that was measured to be faster."""
    has_files: bool = True
    """Whether the data set is read from files, so that the data module has the option `root`."""

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
        arguments += ["--data.root", data] if data and self.has_files else []
        arguments += ["--federation.local_engine", self.engine]
        if any((folder / self.key).glob("*/version_*/checkpoints/last.ckpt")):
            arguments += ["--ckpt_path", "last"]
        return [sys.executable, "-m", "lightning_sparsefl.cli", "fit", *arguments, *self.options]

    def row(self, folder: Path, commit: str) -> dict[str, object]:
        """Return the row of a finished run, from its newest run folder.

        Args:
            folder: Parent folder of the run folders of all runs.
            commit: Commit of the code.
        """
        summary = json.loads((self._newest(folder) / "summary.json").read_text())
        rounds = self._rounds(folder)
        scores = [float(row[self.metric]) for row in rounds if row[self.metric]]
        simulated = [float(row["time/simulated"]) for row in rounds if row.get("time/simulated")]
        return {
            "run": self.name,
            "seed": self.seed,
            "rounds": summary["rounds"],
            "final": scores[-1],
            "best": max(scores),
            "best5": statistics.fmean(sorted(scores)[-5:]),
            "common": summary.get(f"global/{self.metric.rpartition('/')[2]}", ""),
            "before": summary.get(f"selected/{self.metric.rpartition('/')[2]}", ""),
            "after": summary.get(f"finetuned/{self.metric.rpartition('/')[2]}", ""),
            **{column: summary[key] for column, key in _COUNTS.items()},
            "simulated": round(sum(simulated), 3) if simulated else "",
            "seconds": round(sum(float(row["time/round"]) for row in rounds), 1),
            "engine": self.engine,
            **machine(),
            "commit": commit,
        }

    def curve(self, folder: Path) -> list[dict[str, object]]:
        """Return the accuracy over the rounds, at most 25 points that include the last.

        Args:
            folder: Parent folder of the run folders of all runs.
        """
        points, simulated = [], 0.0
        for row in self._rounds(folder):
            simulated += float(row.get("time/simulated") or 0)
            if row[self.metric]:
                sent = sum(int(row[f"comm/{way}link_bytes_total"]) for way in ("up", "down"))
                point = (row["round"], f"{float(row[self.metric]):.4f}", sent, float(row["flops/train_total"]))
                points.append((self.name, self.seed, *point, round(simulated, 3) or ""))
        kept = points[::-1][:: max(1, -(-len(points) // _POINTS))][::-1]
        return [dict(zip(CURVE, point, strict=True)) for point in kept]

    def _newest(self, folder: Path) -> Path:
        return max((folder / self.key).glob("*/version_*"), key=lambda path: int(path.name.rpartition("_")[2]))

    def _rounds(self, folder: Path) -> list[Row]:
        return read(self._newest(folder) / "metrics.csv")


def main(
    runs: Sequence[Run], name: str, table: Callable[[Sequence[Row]], str], argv: Sequence[str] | None = None
) -> None:
    """Run the command line of a script.

    Args:
        runs: Runs, in the order in which they are started.
        name: Name of the CSV file.
        table: Function that creates the Markdown table from the rows.
        argv: Arguments; None for those of the command line.

    Raises:
        SystemExit: If a run failed; the others have been run all the same.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern for the names and seeds of the runs")
    parser.add_argument("--data", default=data_folder(), help="folder of the data sets")
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="parent folder of the run folders")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.csv", help="CSV file; curves are beside it")
    parser.add_argument("--commit", default=None, help="commit of the code; default: that of git")
    parser.add_argument("--minutes", type=float, default=None, help="time limit; the run at that time can be resumed")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--table", action="store_true", help="only write the table of the CSV file to docs/results.md")
    options = parser.parse_args(argv)
    if options.table:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), name, table(read(options.out))))
        return
    code_of = options.commit or ("" if options.list else commit())
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    failed = []
    for run in chosen(runs, options.only, read(options.out)):
        command = run.command(options.folder, options.data)
        print(" ".join(command), flush=True)
        if options.list:
            continue
        code = finish(command, None if end is None else end - time.monotonic())
        if code is None:
            break
        if code:
            failed.append(run.key)
            continue
        append(options.out, [run.row(options.folder, code_of)])
        append(options.out.with_name(f"{options.out.stem}_curves.csv"), run.curve(options.folder), CURVE)
    if failed:
        sys.exit(f"These runs failed: {', '.join(failed)}.")


def finish(command: Sequence[str], seconds: float | None) -> int | None:
    """Run a command, and return its exit code; None if it was stopped at the end of the time.

    Args:
        command: Command, which SIGTERM lets commit its last round.
        seconds: Time that is left; None for no limit.
    """
    if seconds is not None and seconds <= 0:
        return None
    process = subprocess.Popen(command)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()
        return None


def chosen(runs: Iterable[Run], only: str, rows: Iterable[Row]) -> list[Run]:
    """Return the runs that match a pattern and have no row yet."""
    done = {(row["run"], row["seed"]) for row in rows}
    return [run for run in runs if fnmatchcase(run.key, only) and (run.name, str(run.seed)) not in done]
