"""Text of the cells of tables, for terminals, Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_sparsefl.report.measures.mean_std import MeanStd
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.measures.summary import Measure, Summary

PLUS_MINUS = "\u00b1"
EXCEEDED = "-"
"""Text in place of a score where no evaluated round lies within a budget."""


@dataclass(frozen=True)
class Cell:
    """A number as text; an unknown one is empty."""

    mean: str = ""
    """Mean, without its unit."""
    std: str = ""
    """Standard deviation, with as many decimals; empty for one run."""
    unit: str = ""
    """Unit with an SI prefix."""
    is_best: bool = False
    """Whether it is the best value of its column."""
    note: str = ""
    """How many of the runs have a value, if not all; without a value, why it is missing."""

    def text(self, plus_minus: str = PLUS_MINUS) -> str:
        """Return the cell as a line of text.

        Args:
            plus_minus: Sign between the mean and the standard deviation.
        """
        number = f"{self.mean} {plus_minus} {self.std}" if self.std else self.mean
        return " ".join(part for part in (number, self.unit, self.note) if part)


def cell(
    value: MeanStd,
    measure: Measure,
    best: float | None = None,
    runs: int | None = None,
    exceeded: bool = False,
) -> Cell:
    """Format a mean and a standard deviation.

    Args:
        value: Mean and standard deviation.
        measure: Column of the table.
        best: Best mean of the column, if it has one.
        runs: Number of runs; default: those that have a value.
        exceeded: Whether a missing value is one within a budget that all evaluated rounds exceed.

    Example:
        >>> cell(MeanStd(0.91234, 0.0021, 3), Measure("global_acc", "global acc")).text("+-")
        '0.9123 +- 0.0021'
        >>> cell(MeanStd(7.385e8, 1e6, 3), Measure("bytes_up", "bytes up", unit="B")).text("+-")
        '738.5 +- 1.0 MB'
        >>> cell(MeanStd(20, math.nan, 1), Measure("rounds", "rounds", unit="")).text()
        '20'
    """
    if not value.is_known:
        return Cell(note=EXCEEDED if exceeded else "")
    scale, unit = scaled_unit(value.mean, measure.unit) if measure.unit else (1.0, "")
    mean = value.mean / scale
    decimals = 4 if measure.unit is None else _decimals(mean) if unit else int(mean != int(mean) or value.std > 0)
    std = "" if math.isnan(value.std) else f"{value.std / scale:.{decimals}f}"
    note = f"({value.count}/{runs})" if runs is not None and value.count < runs else ""
    return Cell(f"{mean:.{decimals}f}", std, unit, value.mean == best, note)


def _decimals(value: float) -> int:
    """Return the number of decimals with which four digits are shown."""
    exponent = int(f"{value:.3e}".partition("e")[2])  # of the rounded value
    return min(9, max(0, 3 - exponent)) if value else 0


def part_rows(summary: Summary, part: str) -> tuple[list[str], dict[str, list[Cell]]]:
    """Return the headers and the cells of a part of the table.

    Args:
        summary: Table of a report.
        part: Name of the part.

    Returns:
        Headers of the measures, and the cells by group.
    """
    chosen = summary.parts()[part]
    best = {measure.name: summary.best(measure) for measure in chosen}
    rows = {
        group: [
            cell(values[m.name], m, best[m.name], len(summary.runs[group]), m.name in summary.exceeded.get(group, ()))
            for m in chosen
        ]
        for group, values in summary.groups.items()
    }
    return [measure.header for measure in chosen], rows
