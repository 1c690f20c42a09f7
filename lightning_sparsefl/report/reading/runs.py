"""Run folders: how they are found, and what a report reads of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report.reading.columns import Columns, read_columns
from lightning_sparsefl.report.reading.options import FILES, SEEDS, Options, read_options, with_effect

_CLIENT_COLUMNS = ("client", "trained", "failure", "simulated_seconds", "downlink_bytes")


@dataclass(frozen=True)
class Run:
    """What a run folder says of a run, finished or not. An unknown number is NaN, and an unknown column is missing."""

    path: Path
    """Path of the run folder."""
    options: Options = field(default_factory=dict)
    """Options that can change results, by dotted name; the name of the method is that of ``algorithm``."""
    metrics: Columns = field(default_factory=dict)
    """Columns of `metrics.csv`, with one entry per round."""
    clients: Columns = field(default_factory=dict)
    """Columns of `clients.csv` about participation and personal scores."""
    overlaps: Columns = field(default_factory=dict)
    """Columns of `overlap.csv`, with one entry per pair of clients and recorded round."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of `summary.json`; empty for a run that has not finished."""
    local_engine: str = ""
    """Option `federation.local_engine`; empty if it is unknown."""

    @property
    def method(self) -> str:
        """Name of the federated method."""
        return str(self.options["algorithm"])

    @property
    def seed(self) -> str:
        """Random seed of the run, empty if it is unknown."""
        found = [self.options.get(name) for name in SEEDS[:2]] + [self.summary.get("seed")]
        return next((str(seed) for seed in found if seed is not None), "")

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return int(np.nanmax(self.metrics["round"])) + 1 if self._has_rounds else 0

    @property
    def missing_rounds(self) -> int:
        """Number of rounds before those in the folder; above 0 for a run that goes on in a new folder."""
        return int(np.nanmin(self.metrics["round"])) if self._has_rounds else 0

    @property
    def _has_rounds(self) -> bool:
        return "round" in self.metrics and bool(np.isfinite(self.metrics["round"]).any())

    @property
    def is_finished(self) -> bool:
        """Whether the run has written its final table after its last round."""
        return bool(self.summary) and self.summary.get("rounds") == self.rounds


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read run folders.

    Args:
        paths: Run folders, and folders that contain run folders at any depth.

    Returns:
        The runs in the order of `paths`, each once; those below a folder are sorted by name.

    Raises:
        InvalidOption: If a path is not a run folder and contains none, or a file in a run folder is damaged.
    """
    folders = [folder for path in paths for folder in _folders(Path(path))]
    if not folders:
        raise InvalidOption("`RUN` is empty; expected one or more run folders, or folders that contain them.")
    firsts: dict[Path, Path] = {}
    for folder in folders:
        firsts.setdefault(folder.resolve(), folder)
    folders = list(firsts.values())
    source = next((name for name in FILES if all((folder / name).is_file() for folder in folders)), None)
    return [_load(folder, source) for folder in folders]


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise InvalidOption(
            f"`RUN` is '{path}', which {problem}; expected a run folder, or a folder that contains some."
        )
    found = list(_below(path))
    if not found:
        raise InvalidOption(
            f"`RUN` is '{path}', in which there is no run; expected a folder with the `metrics.csv` that a run writes, "
            "or a folder that contains such folders."
        )
    return found


def _below(path: Path) -> Iterator[Path]:
    """Yield the run folders at a path or below it, in the order of their names; links to folders are not followed."""
    for place, names, _ in os.walk(path):
        if _is_run(Path(place)):
            names.clear()
            yield Path(place)
        names.sort(key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``version_10`` after ``version_9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("_")]


def _is_run(folder: Path) -> bool:
    metrics = folder / "metrics.csv"
    if not metrics.is_file():  # no round of the run has finished yet
        return (folder / ".lock").is_file() and any((folder / name).is_file() for name in FILES)
    with metrics.open(encoding="utf-8", errors="replace") as file:  # a CSVLogger's file of this name has no rounds
        return "round" in file.readline(1 << 20).strip().split(",")


def _load(folder: Path, source: str | None) -> Run:
    """Read one run.

    Args:
        folder: Folder of the run.
        source: Name of the file with the options, if all runs have one; None = whichever this run has.
    """
    names = FILES if source is None else (source,)
    files = [folder / name for name in names if (folder / name).is_file()]
    summary = read_summary(folder / "summary.json")
    given = read_options(files[0]) if files else {}
    options: Options = with_effect(given)
    if "algorithm" not in options:  # so that runs of unknown options are not taken for seeds of one group
        options = {**options, "algorithm": str(summary.get("algorithm", folder.parent.name)), "folder": str(folder)}
    return Run(
        path=folder,
        options=options,
        metrics=read_columns(folder / "metrics.csv"),
        clients=read_columns(folder / "clients.csv", _is_about_clients, infinite=math.inf),
        overlaps=read_columns(folder / "overlap.csv"),
        summary=summary,
        local_engine=str(given.get("federation.local_engine", "")),
    )


def _is_about_clients(name: str) -> bool:
    return name in _CLIENT_COLUMNS or name.startswith("personal/")


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of a `summary.json`; an empty dict if the file is missing or damaged.

    Args:
        path: Path of the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):  # replaced as a whole, so a damaged file says nothing
        return {}
    return content if isinstance(content, dict) else {}


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return short names of run folders: their paths without the parts that all have in common at the start.

    Args:
        runs: Runs.

    Example:
        >>> names_of([Run(Path("runs/FedAvg/version_0")), Run(Path("runs/FedSpa/version_0"))])
        ['FedAvg/version_0', 'FedSpa/version_0']
    """
    parts = [run.path.resolve().parts if len(runs) > 1 else run.path.resolve().parts[-2:] for run in runs]
    while len(runs) > 1 and min(map(len, parts)) > 2 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    return ["/".join(part) for part in parts]
