"""The data of figures, apart from how they are drawn; `rows` gives them as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl.report.measures.mean_std import MeanStd
from lightning_sparsefl.report.reading.columns import Column

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plot(ABC):
    """A figure of a report.

    A plot that has nothing to draw says in `missing` what the run folders lack.
    """

    name: str
    """Name of the files, without an extension."""
    title: str
    """Title in the page."""
    caption: str
    """What the figure shows, for the page."""
    missing: str | None = None
    """Why there is nothing to draw, and what to do; None if there is something."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return what is drawn, one row for each mark."""


@dataclass(frozen=True)
class Line:
    """A line with a band of one standard deviation."""

    group: str
    """Name of the group of runs."""
    x: Sequence[MeanStd]
    """Positions, in ascending order."""
    y: Sequence[MeanStd]
    """Heights."""


@dataclass(frozen=True, kw_only=True)
class Curves(Plot):
    """Lines of each group in panels below each other."""

    x_label: str
    """Label of the horizontal axis."""
    x_unit: str | None = None
    """Unit of the horizontal axis, which is labelled with an SI prefix; None = plain numbers."""
    panels: Mapping[str, Sequence[Line]]
    """Lines by the label of the vertical axis."""

    def rows(self) -> list[Row]:
        """Return one row for each point."""
        return [
            {
                "panel": panel,
                "group": line.group,
                "x": x.mean,
                "mean": y.mean,
                "std": y.std,
                "runs": y.count,
            }
            for panel, lines in self.panels.items()
            for line in lines
            for x, y in zip(line.x, line.y, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Bars(Plot):
    """Horizontal bars of each group in panels side by side."""

    units: Mapping[str, str]
    """Unit of each panel, by the panel's label."""
    series: Mapping[str, Mapping[str, Mapping[str, MeanStd]]]
    """Values by panel, by series and by group."""
    sizes: Mapping[str, int]
    """Number of runs of each group."""

    def rows(self) -> list[Row]:
        """Return one row for each bar, also for those that are missing."""
        return [
            {
                "panel": panel,
                "series": series,
                "group": group,
                "mean": value.mean,
                "std": value.std,
                "runs": value.count,
                "of": self.sizes[group],
            }
            for panel, found in self.series.items()
            for series, values in found.items()
            for group, value in values.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Boxes(Plot):
    """Distribution of a value in each group, as a box from quartile to quartile."""

    x_label: str
    """Label of the horizontal axis."""
    x_unit: str | None = None
    """Unit of the horizontal axis, which is labelled with an SI prefix; None = plain numbers."""
    values: Mapping[str, Column]
    """Values by group."""
    worst_tenths: Mapping[str, float] | None = None
    """Mean of the worst tenth by group, if it is drawn."""

    def rows(self) -> list[Row]:
        """Return one row for each value."""
        return [{"group": group, "value": float(value)} for group, found in self.values.items() for value in found]


@dataclass(frozen=True)
class Panel:
    """A table that is drawn as colours."""

    title: str
    """Title: name of the group, and of the run if the group has several."""
    table: Column
    """Values, of shape (rows, columns); NaN is left blank."""
    row_names: Sequence[str]
    """Names of the rows."""
    column_names: Sequence[str]
    """Names of the columns."""
    marks: Sequence[tuple[int, int]] = ()
    """Rows and columns of cells with a cross."""


@dataclass(frozen=True, kw_only=True)
class Maps(Plot):
    """Tables of colours, one for each group."""

    x_label: str
    """Label of the columns."""
    y_label: str
    """Label of the rows."""
    colour_label: str | None
    """Label of the colours; None if a cell is either filled or blank."""
    colour_unit: str | None = None
    """Unit of the colours, which are labelled with an SI prefix; None = plain numbers."""
    limits: tuple[float, float] | None = None
    """Ends of the colour scale; None = those of the values."""
    panels: Sequence[Panel] = ()
    """Panels, in the order of the groups."""
    shows_last: bool = False
    """Whether the values of the last column are shown as numbers too."""

    def rows(self) -> list[Row]:
        """Return one row for each cell that has a value."""
        return [
            {"panel": panel.title, "row": row, "column": column, "value": float(panel.table[r, c])}
            for panel in self.panels
            for r, row in enumerate(panel.row_names)
            for c, column in enumerate(panel.column_names)
            if panel.table[r, c] == panel.table[r, c]
        ]
