"""Columns of a CSV file of a run as arrays, in which an unknown value is NaN."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_sparsefl.errors import InvalidOption

Column: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Column]
_MOST_ROUNDS = 10**7
_TEXTS = {"failure"}
"""Columns of text, which are read as 1 where there is a text and 0 elsewhere."""


def read_columns(
    path: Path, wanted: Callable[[str], bool] = lambda name: True, infinite: float = math.nan
) -> dict[str, Column]:
    """Read a table of a run, also while it is being written: a last line that is not complete is left out.

    Args:
        path: Path of the CSV file; a file that does not exist has no columns.
        wanted: Whether a column of this name is read; `round` always is.
        infinite: Number that stands for values that are not finite.

    Returns:
        Columns by name, float64 of shape (rows,). Empty cells are NaN.

    Raises:
        InvalidOption: If the file is not a table of a run.
    """
    if not path.is_file():
        return {}
    with path.open(newline="\n", encoding="utf-8", errors="replace") as file:  # a text may have carriage returns
        reader = csv.reader(line for line in file if line.endswith("\n"))
        try:
            return _columns(reader, wanted, infinite)
        except (ValueError, csv.Error) as error:
            raise InvalidOption(
                f"{path} is not a table of a run ({error}); remove the run, or repair the file."
            ) from None


def _columns(reader: Iterator[list[str]], wanted: Callable[[str], bool], infinite: float) -> dict[str, Column]:
    names = next(reader, list[str]())
    if names and "round" not in names:
        raise ValueError("it has no column `round`")
    chosen = [(place, name) for place, name in enumerate(names) if name == "round" or wanted(name)]
    values = {name: array("d") for _, name in chosen}
    broken = ""
    for row in reader:
        if broken:  # and not the last row, which may be written right now
            raise ValueError(broken)
        if len(row) != len(names):
            broken = f"row {len(values['round']) + 1} has {len(row)} cells, and the table {len(names)} columns"
            continue
        for place, name in chosen:
            values[name].append(float(bool(row[place])) if name in _TEXTS else _number(row[place], infinite))
    columns = {name: np.array(column) for name, column in values.items()}
    rounds = columns.get("round", np.zeros(0))
    if not bool(np.all((rounds >= 0) & (rounds < _MOST_ROUNDS) & (rounds % 1 == 0))):
        raise ValueError("a row has a round that is not a whole number >= 0")
    return columns


def _number(cell: str, infinite: float) -> float:
    value = float(cell) if cell else math.nan
    return value if not cell or math.isfinite(value) else infinite
