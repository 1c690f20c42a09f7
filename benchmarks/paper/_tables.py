"""Markdown tables of the rows, and their places in a document."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from _rows import REPOSITORY, Row


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
    values = [100 * float(row[column]) for row in rows if row[column]]
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" ({statistics.stdev(values):.2f})" if len(values) > 1 else "")


def mean(rows: Sequence[Row], column: str, scale: float = 1.0) -> str:
    """Format the mean of a column; a dash without values.

    Args:
        rows: Rows of one method.
        column: Name of a column of numbers.
        scale: Unit of the table in units of the column.
    """
    values = [float(row[column]) / scale for row in rows if row[column]]
    return f"{statistics.fmean(values):.2f}" if values else "-"


def seconds_a_round(rows: Sequence[Row]) -> str:
    """Format the mean number of seconds of a round; a dash without rows."""
    values = [float(row["seconds"]) / float(row["rounds"]) for row in rows]
    return f"{statistics.fmean(values):.1f}" if values else "-"


def of(rows: Iterable[Row], name: str) -> list[Row]:
    """Return the rows of one run, of all seeds."""
    return [row for row in rows if row["run"] == name]


def published(config: str) -> str:
    """Return the accuracy that the paper prints for a cell; a dash where the file of the cell names none.

    Args:
        config: Configuration file, relative to ``configs/``.
    """
    header = (Path(REPOSITORY) / "configs" / config).read_text().partition("seed_everything")[0]
    found = re.search(r"Published:.*?accuracy ([\d.]*\d)", header)
    return found[1] if found else "-"


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Create a Markdown table with the first column left-aligned and the others right-aligned."""
    rule = "|---|" + "--:|" * (len(head) - 1)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
