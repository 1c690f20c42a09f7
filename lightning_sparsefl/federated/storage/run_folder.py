"""The folder of one run: tables that the engine writes itself, beside the loggers'.

::

    config.yaml      the whole configuration (written by the command line)
    metrics.csv      a row per round
    clients.csv      a row per client and round, for those that trained or were scored
    finetuned.csv    a row per client, before and after fine-tuning, where the method has one
    summary.json     the final table
    checkpoints/     last.ckpt, the one before it (previous.ckpt), and the records of the clients
    export/          models as files of their own, from `sparsefl export`
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sparsefl.federated.storage.atomic_files import remove_leftovers, write_text_atomically


class Table:
    """A CSV file that grows by rows; a new column rewrites it, with empty cells in the old rows.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows."""
        new = [name for row in rows for name in row if name not in self._columns]
        if new:
            old = self.read()
            self._columns += list(dict.fromkeys(new))
            self._write(old)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)

    def read(self) -> list[dict[str, str]]:
        """All rows, as text."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def cut_back(self, rounds: int) -> None:
        """Drop the rows of rounds that were not committed, and one that a kill has torn.

        Args:
            rounds: That were; whole rows whose `round` is smaller stay.
        """
        # a torn row lacks cells, and the first of its cells, the round, may be a part of the number
        rows = [row for row in self.read() if None not in row.values() and int(row["round"]) < rounds]
        self._columns = list(rows[0]) if rows else []
        if rows:
            self._write(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text_atomically(self.path, text.getvalue())


class RunFolder:
    """Files of one run.

    Args:
        path: Of the folder; made if needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.metrics = Table(path / "metrics.csv")
        self.clients = Table(path / "clients.csv")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def cut_back(self, rounds: int) -> None:
        """Make the tables agree with a checkpoint of so many rounds, and delete half-written files."""
        for folder in (self.path, self.checkpoints, self.checkpoints / "clients"):
            remove_leftovers(folder)
        self.metrics.cut_back(rounds)
        self.clients.cut_back(rounds)

    def write_finetuned(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `finetuned.csv`."""
        path = self.path / "finetuned.csv"
        path.unlink(missing_ok=True)
        Table(path).append(rows)

    def read_summary(self) -> dict[str, Any]:
        """The content of `summary.json`; empty if there is none."""
        path = self.path / "summary.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        text = json.dumps(summary, indent=2, sort_keys=False)
        write_text_atomically(self.path / "summary.json", text + "\n")


def new_version(folder: Path) -> Path:
    """Make `folder/version_N` with the next free number; two runs that start together get two folders.

    Args:
        folder: Of an algorithm's runs; made if needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = max(_versions(folder), default=-1) + 1
    while True:
        path = folder / f"version_{version}"
        try:
            path.mkdir()
        except FileExistsError:
            version += 1
        else:
            return path


def newest_version(folder: Path) -> Path | None:
    """The newest of an algorithm's runs, whether or not it has a checkpoint; None if there is none.

    Args:
        folder: Of the runs.
    """
    versions = _versions(folder)
    return versions[max(versions)] if versions else None


def _versions(folder: Path) -> dict[int, Path]:
    return {int(p.name.split("_")[1]): p for p in folder.glob("version_*") if p.name.split("_")[1].isdigit()}


def last_run(root: Path, name: str) -> Path | None:
    """The newest run of an algorithm that has a checkpoint; None if there is none.

    Args:
        root: Where run folders are made; a logger of the user's may have put its own below it.
        name: Of the algorithm's folder.
    """
    runs = {version: run for version, run in _versions(root / name).items() if _checkpoints(run)}
    if runs:
        return runs[max(runs)]
    elsewhere = [path for run in root.glob("lightning_logs/version_*") for path in _checkpoints(run)]
    newest = max(elsewhere, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent.parent


def _checkpoints(run: Path) -> list[Path]:
    """Those of a run's that are there; a kill may have left the one before the last alone."""
    return [path for name in ("last", "previous") if (path := run / "checkpoints" / f"{name}.ckpt").is_file()]
