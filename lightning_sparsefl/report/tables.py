"""Tables for the terminal, printed with rich."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_sparsefl.report.measures.client_statistics import STATISTICS, is_statistic
from lightning_sparsefl.report.output import is_silent

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_GROUPS = (
    "global",
    "personal",
    "personal_after",
    "unseen",
    "selected",
    "selected_unseen",
    "finetuned",
    "finetuned_unseen",
)
LEGEND = """\
Bytes and FLOPs are sums over clients and rounds; those "by formula" follow
that of the method's paper, or else count the weights that masks keep."""
"""Explanation of the costs in the final table."""
NOT_COUNTED = "not counted"
"""Cell of a cost that is unknown, which is not zero."""
_MASK_BYTES = "comm/mask_bytes_total"
_COSTS = (
    ("comm/uplink_bytes_total", "bytes up", "B"),
    ("comm/downlink_bytes_total", "bytes down", "B"),
    (_MASK_BYTES, "  of both, masks", "B"),
    ("comm/paper_bytes_total", "bytes, by formula", "B"),
    ("flops/train_total", "training FLOPs", "FLOP"),
    ("flops/paper_total", "training FLOPs, by formula", "FLOP"),
)


def quantity(value: float, unit: str) -> str:
    """Format a number with an SI prefix and four digits.

    Args:
        value: Number.
        unit: Unit of the number.

    Example:
        >>> quantity(7.385e11, "B"), quantity(12, "B")
        ('738.5 GB', '12 B')
    """
    power = 0
    while math.isfinite(value) and abs(value) >= 999.95 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.4g} {_PREFIXES[power]}{unit}"


def score(value: float) -> str:
    """Format a metric with four decimals, or with an exponent if it is too small or too large for them.

    Args:
        value: Value of the metric.

    Example:
        >>> score(0.91234), score(0.00001234), score(2e9)
        ('0.9123', '1.234e-05', '2.000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e6 else f"{value:.3e}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], console: Console | None = None
) -> None:
    """Print a table; the first column is left-aligned, the others are right-aligned.

    Nothing is printed while output is silenced.

    On a terminal the table is limited to its width; in a pipe or a file no line is wrapped.

    Args:
        title: Title, printed on a line of its own.
        columns: Headers of the columns; without a header row if all are empty.
        rows: Rows, with one cell per column.
        console: Console to print to; default: standard output.
    """
    if is_silent():
        return
    console = console or _standard_output()
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _standard_output() -> Console:
    """Create a console with the width of the terminal, or without a limit if there is no terminal."""
    console = _Output()
    return console if console.is_terminal else _Output(width=10_000)


class _Output(Console):
    """Standard output; rich would end the program with code 1 and without a message if its reader has ended."""

    def on_broken_pipe(self) -> None:
        """Leave the error to the caller, as `print` does."""
        raise BrokenPipeError


def summary_rows(*summaries: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Create the rows of the final table: scores of all models, then bytes, FLOPs, density and privacy.

    In each group losses come last, and the spread of a metric over clients follows the metric.

    Args:
        *summaries: Summaries of runs, as in their `summary.json`, one column each. The first one decides the rows; what
            another one lacks is blank.

    Example:
        >>> summary_rows({"flops/train_total": 2e6, "global/val_loss": 0.5, "global/val_acc": 0.75})
        [('global val_acc', '0.7500'), ('global val_loss', '0.5000'), ('training FLOPs', '2 MFLOP')]
    """
    first = summaries[0]

    def row(label: str, name: str, cell: Callable[[Any], str]) -> tuple[str, ...]:
        return (label, *(cell(each[name]) if name in each else "" for each in summaries))

    rows = [row(label, name, _score) for group in _GROUPS for label, name in _scores(first, group)]
    spent = [cost for cost in _COSTS if cost[0] in first]
    rows += [row(word, n, partial(quantity, unit=unit)) for n, word, unit in spent if first[n] or n != _MASK_BYTES]
    if spent and not any(name.startswith("flops/") for name, _, _ in spent):
        rows.append(("training FLOPs", *(NOT_COUNTED for _ in summaries)))
    if "density/all" in first:
        rows.append(row("density of the masks", "density/all", score))
    if "privacy/epsilon" in first:
        rows.append(row(f"epsilon at delta {first['privacy/delta']:g}", "privacy/epsilon", "{:.2f}".format))
    return rows


def _scores(summary: Mapping[str, Any], group: str) -> Iterator[tuple[str, str]]:
    """Yield the label and the name of each score of a group."""
    names = [name for name in summary if name.split("/")[0] == group and not is_statistic(name, summary)]
    for name in sorted(names, key=lambda name: "loss" in name):
        yield f"{group.replace('_', ' ')} {name.split('/', 1)[1]}", name
        for suffix, word in STATISTICS.items():
            if name + suffix in summary and is_statistic(name + suffix, summary):
                yield f"  {word}", name + suffix


def _score(value: float) -> str:
    return str(value) if isinstance(value, int) else score(value)
