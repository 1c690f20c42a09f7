"""Tables for the terminal, drawn by rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float, unit: str) -> str:
    """A number with an SI prefix and four digits.

    Example:
        >>> quantity(7.385e11, "B"), quantity(12, "B")
        ('738.5 GB', '12 B')
    """
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def score(value: float) -> str:
    """A metric with four decimals.

    Example:
        >>> score(0.91234)
        '0.9123'
    """
    return f"{value:.4f}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], console: Console | None = None) -> None:
    """Print rows under a title; the first column is left-aligned, numbers are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    (console or Console()).print(table)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the final table.

    Args:
        summary: As in a run's `summary.json`.

    Example:
        >>> summary_rows({"comm/uplink_bytes_total": 2e6})
        [('bytes up', '2 MB')]
    """
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        if name.split("/")[0] in ("global", "personal") and not name.endswith(("_std", "_worst10")):
            rows.append((_spoken(name), score(value)))
            for suffix, word in (("_std", "std over clients"), ("_worst10", "worst 10 percent")):
                if name + suffix in summary:
                    rows.append((f"  {word}", score(summary[name + suffix])))
    for name, word, unit in (
        ("comm/uplink_bytes_total", "bytes up", "B"),
        ("comm/downlink_bytes_total", "bytes down", "B"),
        ("comm/mask_bytes_total", "  of these, mask bits", "B"),
        ("comm/paper_bytes_total", "bytes, as papers count", "B"),
        ("flops/train_total", "training FLOPs", "FLOP"),
        ("flops/paper_total", "training FLOPs, as papers count", "FLOP"),
    ):
        if name in summary:
            rows.append((word, quantity(summary[name], unit)))
    if "sparsity/density" in summary:
        rows.append(("density held by clients", score(summary["sparsity/density"])))
    return rows


def _spoken(name: str) -> str:
    group, metric = name.split("/", 1)
    return f"{group} {metric}"
