"""The folder of one run, and the tables that the engine writes there beside the loggers' files.

::

    config.yaml      the whole configuration (written by the command line)
    metrics.csv      a row per round
    clients.csv      a row per client and round, for those that trained or were scored
    finetuned.csv    a row per client, before and after fine-tuning, where the method has one
    summary.json     the final table
    checkpoints/     last.ckpt, the one before it (previous.ckpt), and the records of the clients
    export/          models as files of their own, from `sparsefl export`
    .lock            held by the process that trains in the folder

A table that cannot be read, because it was edited or damaged, never stops a run: it is renamed to ``<name>.damaged``,
with a warning, and a new one begins.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_sparsefl.federated.storage.atomic_files import remove_leftovers, write_text_atomically
from lightning_sparsefl.federated.storage.folder_lock import FolderLock


class Table:
    """A CSV file that grows by rows; a new column rewrites it, with empty cells in the old rows.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows."""
        new = [name for row in rows for name in row if name not in self._columns]
        if new or not self.path.exists():
            old = self._whole_rows()
            self._columns += list(dict.fromkeys(new))
            self._write(old)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)

    def read(self) -> list[dict[str, str]]:
        """Return all rows, as text."""
        return self._read()[1]

    def _read(self) -> tuple[Sequence[str], list[dict[str, str]]]:
        """Return columns and rows; both are empty if the file is missing or empty."""
        if not self.path.exists():
            return (), []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        return reader.fieldnames or (), rows

    def cut_back(self, rounds: int) -> None:
        """Drop the rows of rounds that were not committed, and a last row that a kill has truncated.

        Args:
            rounds: Number of committed rounds; whole rows whose `round` is smaller stay.
        """
        rows = [row for row in self._whole_rows() if int(row["round"]) < rounds]
        self._columns = list(rows[0]) if rows else []
        if rows:
            self._write(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _whole_rows(self) -> list[dict[str, str]]:
        """Return the rows that are complete; of a damaged table, which is set aside, there are none."""
        try:
            columns, rows = self._read()
            # a truncated row lacks cells, and the first of its cells, the round, may be a part of the number
            rows = [row for row in rows if None not in row.values()]
            if columns:
                _require_table(columns, rows)
        except (ValueError, csv.Error) as error:
            self._set_aside(str(error))
            return []
        return rows

    def _set_aside(self, reason: str) -> None:
        names = (f"{self.path.name}.damaged{number or ''}" for number in itertools.count())
        target = next(path for path in map(self.path.with_name, names) if not path.exists())
        self.path.replace(target)
        rank_zero_warn(f"{self.path} is damaged ({reason}): it is {target.name} now, and a new table begins.")

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text_atomically(self.path, text.getvalue())


def _require_table(columns: Sequence[str], rows: Sequence[Mapping[Any, Any]]) -> None:
    """Raise ValueError if a table has no column of rounds, or a row more cells than columns or no round."""
    if "round" not in columns:
        raise ValueError("it has no column `round`")
    for row in rows:
        if None in row:
            raise ValueError("a row has more cells than the table has columns")
        if not row["round"].isdecimal():
            raise ValueError(f"a row has the round {row['round'][:20]!r}")


class RunFolder:
    """Files of one run.

    Args:
        path: Path of the folder; made if needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.metrics = Table(path / "metrics.csv")
        self.clients = Table(path / "clients.csv")
        self.lock = FolderLock(path)

    @property
    def checkpoints(self) -> Path:
        """Path of the checkpoints' folder."""
        return self.path / "checkpoints"

    def cut_back(self, rounds: int) -> None:
        """Make the tables agree with a checkpoint, and delete half-written files.

        Args:
            rounds: Number of rounds that the checkpoint has committed.
        """
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
        """Return the content of `summary.json`; an empty one if the file is missing or damaged."""
        try:
            content = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        text = json.dumps(summary, indent=2, sort_keys=False)
        write_text_atomically(self.path / "summary.json", text + "\n")


def new_version(folder: Path) -> Path:
    """Make `folder/version_N` with the next free number; two runs that start together get two folders.

    Args:
        folder: Folder of an algorithm's runs; made if needed.
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
    """Return the newest of an algorithm's runs, with or without a checkpoint; None without runs.

    Args:
        folder: Folder of the runs.
    """
    versions = _versions(folder)
    return versions[max(versions)] if versions else None


def _versions(folder: Path) -> dict[int, Path]:
    return {int(p.name.split("_")[1]): p for p in folder.glob("version_*") if p.name.split("_")[1].isdigit()}


def last_run(root: Path, name: str) -> Path | None:
    """Return the newest run of an algorithm that has a checkpoint, or None.

    Args:
        root: Folder where run folders are made; a logger of the user's may have put its own below it.
        name: Name of the algorithm's folder.
    """
    runs = {version: run for version, run in _versions(root / name).items() if _checkpoints(run)}
    if runs:
        return runs[max(runs)]
    elsewhere = [path for run in root.glob("lightning_logs/version_*") for path in _checkpoints(run)]
    newest = max(elsewhere, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent.parent


def _checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints; a kill may have left only the one before the last."""
    return [path for name in ("last", "previous") if (path := run / "checkpoints" / f"{name}.ckpt").is_file()]
