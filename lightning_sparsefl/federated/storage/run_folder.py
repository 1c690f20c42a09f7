"""The folder of one run, and the tables that the engine writes there next to the files of the loggers.

::

    config.yaml      the complete configuration (written by the command line)
    hparams.yaml     the hyper-parameters as names and plain values
    metrics.csv      one row per round
    clients.csv      one row per client and round, for clients that were trained or evaluated
    overlap.csv      one row per pair of clients and pictured round: the overlap of the masks that they uploaded last
    names.csv        one row per client with its name and number of examples, for data whose clients have names
    finetuned.csv    one row per client with scores before and after fine-tuning, for methods that fine-tune
    summary.json     the final results; a number that is not finite is null
    checkpoints/     last.ckpt, the one before it (previous.ckpt), and the records of the clients
    export/          models exported by `sparsefl export`
    .lock            lock file of the process that trains in the folder

A table that cannot be read, because it was edited or damaged, does not stop a run: it is renamed to ``<name>.damaged``
with a warning, and a new table is started.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.core.saving import save_hparams_to_yaml

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.atomic_files import write_text_atomically
from lightning_sparsefl.files import remove_leftovers
from lightning_sparsefl.report.reading.runs import read_summary

FINETUNED = "finetuned.csv"
"""Name of the table of fine-tuning."""


class Table:
    """A CSV file that rows are appended to; a new column rewrites it, with empty cells in the old rows.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; their new names become new columns.

        Args:
            rows: Rows as mappings from column to value.
        """
        new = [name for row in rows for name in row if name not in self._columns]
        if new or not self.path.exists():
            old = self._whole_rows()
            self._columns += list(dict.fromkeys(new))
            self._write(old)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)

    def fill(self, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
        """Fill empty cells of rows that the table has, and insert rows that it does not have.

        Args:
            rows: Rows as mappings from column to value.
            key: Columns with whole numbers that identify a row, by which the table is sorted.
        """
        found = {tuple(int(row[name]) for name in key): dict[str, Any](row) for row in self._whole_rows(key)}
        for row in rows:
            old = found.setdefault(tuple(int(row[name]) for name in key), {})
            old.update({name: value for name, value in row.items() if old.get(name, "") == ""})
        self._columns = list(dict.fromkeys(name for row in found.values() for name in row))
        self._write([found[place] for place in sorted(found)])

    def read(self) -> list[dict[str, str]]:
        """Return all rows with their values as text."""
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
        """Delete the rows of rounds that were not committed, and a truncated last row.

        Args:
            rounds: Number of committed rounds; complete rows with a smaller `round` are kept.
        """
        rows = [row for row in self._whole_rows() if int(row["round"]) < rounds]
        self._columns = list(rows[0]) if rows else []
        if rows:
            self._write(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _whole_rows(self, key: Sequence[str] = ("round",)) -> list[dict[str, str]]:
        """Return the complete rows; rename a table with a damaged column of the key and return an empty list."""
        try:
            columns, rows = self._read()
            # a truncated row has too few cells, and its first cell, the round, may be cut as well
            rows = [row for row in rows if None not in row.values()]
            if columns:
                _require_table(columns, rows, key)
        except (ValueError, csv.Error) as error:
            self._set_aside(str(error))
            return []
        return rows

    def _set_aside(self, reason: str) -> None:
        names = (f"{self.path.name}.damaged{number or ''}" for number in itertools.count())
        target = next(path for path in map(self.path.with_name, names) if not path.exists())
        self.path.replace(target)
        rank_zero_warn(f"{self.path} is damaged ({reason}); it was renamed to {target.name}, and a new table starts.")

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text_atomically(self.path, text.getvalue())


def _require_table(columns: Sequence[str], rows: Sequence[Mapping[Any, Any]], key: Sequence[str]) -> None:
    """Raise ValueError if a table lacks a column of the key, or a row has too many cells or an invalid key."""
    missing = [name for name in key if name not in columns]
    if missing:
        raise ValueError(f"it has no column `{missing[0]}`")
    for row in rows:
        if None in row:
            raise ValueError("a row has more cells than the table has columns")
        for name in key:
            if not row[name].isdecimal():
                raise ValueError(f"a row has the {name} {row[name][:20]!r}")


class RunFolder:
    """Files of one run.

    Args:
        path: Path of the folder, which is created if needed.
    """

    def __init__(self, path: Path) -> None:
        self.shown = path
        """Path as it was given, for messages."""
        self.path = path = path.absolute()
        """Path that stays the same where code of the user changes the current folder."""
        path.mkdir(parents=True, exist_ok=True)
        self.metrics = Table(path / "metrics.csv")
        self.clients = Table(path / "clients.csv")
        self.overlaps = Table(path / "overlap.csv")

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.path / "checkpoints"

    def cut_back(self, rounds: int) -> None:
        """Cut the tables back to a checkpoint, and delete files of interrupted writes.

        Args:
            rounds: Number of rounds committed by the checkpoint.
        """
        for folder in (self.path, self.checkpoints, self.checkpoints / "clients"):
            remove_leftovers(folder)
        for table in (self.metrics, self.clients, self.overlaps):
            table.cut_back(rounds)

    def write_finetuned(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `finetuned.csv`."""
        self.discard_finetuned()
        Table(self.path / FINETUNED).append(rows)

    def discard_finetuned(self) -> None:
        """Delete `finetuned.csv`, which an earlier end of the run may have left."""
        (self.path / FINETUNED).unlink(missing_ok=True)

    def write_names(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Write `names.csv`.

        Args:
            names: Name of each client.
            sizes: Number of training examples of each client.
        """
        path = self.path / "names.csv"
        path.unlink(missing_ok=True)
        clients = enumerate(zip(names, sizes, strict=True))
        Table(path).append([{"client": client, "name": name, "examples": size} for client, (name, size) in clients])

    def write_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Write `hparams.yaml`, the file that a TensorBoard logger in this folder would write."""
        save_hparams_to_yaml(self.path / "hparams.yaml", dict(hparams))

    def read_summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`, with NaN for null; an empty dict if the file is missing or damaged."""
        content = read_summary(self.path / "summary.json")
        return {name: math.nan if value is None else value for name, value in content.items()}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, with null for a number that is not finite, which JSON does not have."""
        plain = {name: None if _is_infinite_or_nan(value) else value for name, value in summary.items()}
        text = json.dumps(plain, indent=2, sort_keys=False, allow_nan=False)
        write_text_atomically(self.path / "summary.json", text + "\n")


def _is_infinite_or_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def new_version(folder: Path) -> Path:
    """Create `folder/version_N` with the next free number; concurrent runs get different folders.

    Args:
        folder: Folder of an algorithm's runs in `trainer.default_root_dir`, which is created if needed.

    Raises:
        InvalidOption: If the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_created(folder.parent, folder, error) from error
    version = max(_versions(folder), default=-1) + 1
    while True:
        path = folder / f"version_{version}"
        try:
            path.mkdir()
        except FileExistsError:
            version += 1
        except OSError as error:
            raise _not_created(folder.parent, path, error) from error
        else:
            return path


def _not_created(root: Path, folder: Path, error: OSError) -> InvalidOption:
    return InvalidOption(
        f"`trainer.default_root_dir` is '{root}', in which the folder '{folder.relative_to(root)}' cannot be created "
        f"({error.strerror}); expected a folder that can be written to, which is created if needed."
    )


def newest_version(folder: Path) -> Path | None:
    """Return the newest run of an algorithm, with or without a checkpoint; None without runs.

    Args:
        folder: Folder of the runs.
    """
    versions = _versions(folder)
    return versions[max(versions)] if versions else None


def _versions(folder: Path) -> dict[int, Path]:
    found = folder.glob("version_*")
    return {int(match[1]): path for path in found if (match := re.fullmatch(r"version_(\d+)", path.name))}


def last_run(root: Path, name: str) -> Path | None:
    """Return the newest run of an algorithm that has a checkpoint, or None.

    Args:
        root: Folder of all run folders, including those that the user's loggers created.
        name: Name of the algorithm's folder.
    """
    runs = {version: run for version, run in _versions(root / name).items() if checkpoints_of(run)}
    if runs:
        return runs[max(runs)]
    elsewhere = [path for run in root.glob("lightning_logs/version_*") for path in checkpoints_of(run)]
    newest = max(elsewhere, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent.parent


def checkpoints_of(run: Path) -> list[Path]:
    """Return a run's checkpoints, the newest first; after a crash, only the previous one may exist.

    Args:
        run: Folder of the run.
    """
    return [path for name in ("last", "previous") if (path := run / "checkpoints" / f"{name}.ckpt").is_file()]
