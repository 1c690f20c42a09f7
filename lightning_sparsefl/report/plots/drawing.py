"""Drawing of the figures of a report with matplotlib; all numbers come from the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from lightning_sparsefl.report.measures.mean_std import MeanStd
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.plots.colour_maps import draw_maps
from lightning_sparsefl.report.plots.data import Bars, Boxes, Curves, Line, Maps, Plot
from lightning_sparsefl.report.plots.style import (
    COLOURS,
    INK,
    SMALL,
    SOFT,
    WIDTH,
    WORST,
    height_of_rows,
    look,
    render,
    short_names,
    styled,
)

_MOST_MARKERS = 12
"""Maximum number of markers on a line."""
_LARGE_RATIO = 15
"""Ratio of the largest to the smallest end of a line above which the axis is logarithmic."""


def draw(plot: Plot, places: Mapping[str, int]) -> Figure:
    """Draw a figure.

    Args:
        plot: Data of the figure, which is not missing.
        places: Place of each group in the report, which decides its colour in all figures.
    """
    with styled():
        if isinstance(plot, Curves):
            return _curves(plot, places)
        if isinstance(plot, Bars):
            return _bars(plot)
        if isinstance(plot, Boxes):
            return _boxes(plot)
        assert isinstance(plot, Maps)
        return draw_maps(plot)


def draw_files(plot: Plot, places: Mapping[str, int]) -> dict[str, bytes]:
    """Draw a figure and return the contents of its files by extension.

    Args:
        plot: Data of the figure, which is not missing.
        places: Place of each group in the report.
    """
    figure = draw(plot, places)
    with styled():
        return render(figure)


# ---- lines


def _curves(plot: Curves, places: Mapping[str, int]) -> Figure:
    names = list(dict.fromkeys(line.group for lines in plot.panels.values() for line in lines))
    columns = 1 if max(map(len, short_names(names))) > 24 else 2 if len(names) > 1 else 1
    legend = 0.0 if len(names) == 1 else 0.14 * math.ceil(len(names) / columns) + 0.05
    figure = Figure(figsize=(WIDTH, 0.35 + legend + 1.45 * len(plot.panels)))
    grid = figure.subplots(len(plot.panels), 1, sharex=True, squeeze=False)[:, 0]
    handles: dict[str, Line2D] = {}
    ends = [line.x[-1].mean for lines in plot.panels.values() for line in lines]
    scale, unit = (1.0, "") if plot.x_unit is None else scaled_unit(max(ends), plot.x_unit)
    for axes, (label, lines) in zip(grid, plot.panels.items(), strict=True):
        for line in lines:
            handles[line.group] = _line(axes, line, scale, look(places[line.group]))
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    _x_axis(grid[-1], plot, unit, logarithmic=bool(unit) and max(ends) > _LARGE_RATIO * min(ends))
    if len(names) > 1:
        figure.legend(
            [handles[name] for name in names],
            short_names(names),
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            handlelength=2.6,
            columnspacing=1.2,
            labelspacing=0.25,
            borderaxespad=0.0,
        )
    else:
        grid[0].set_title(short_names(names)[0], loc="left")
    return figure


def _line(axes: Axes, line: Line, scale: float, style: Mapping[str, Any]) -> Line2D:
    """Draw a line with its band, and return the line."""
    x, y = np.array([point.mean for point in line.x]) / scale, np.array([point.mean for point in line.y])
    std = np.array([point.std for point in line.y])
    every = max(1, math.ceil(len(x) / _MOST_MARKERS))
    (drawn,) = axes.plot(x, y, label=line.group, markevery=every, **style)
    if np.isfinite(std).any():
        axes.fill_between(x, y - std, y + std, color=style["color"], alpha=0.18, linewidth=0)
    return drawn


def _x_axis(axes: Axes, plot: Curves, unit: str, logarithmic: bool) -> None:
    axes.set_xlabel(f"{plot.x_label} ({unit})" if unit else plot.x_label)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        # with two ticks as the minimum, an axis of one round has fractions
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=plot.x_unit is None, min_n_ticks=1))


# ---- rows


def _row_names(axes: Axes, names: Sequence[str], label: bool = True) -> None:
    axes.set_yticks(range(len(names)), short_names(names) if label else [])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _bars(plot: Bars) -> Figure:
    names = list(plot.sizes)
    series = list(dict.fromkeys(name for found in plot.series.values() for name in found))
    height = height_of_rows(len(names) * len(series), 0.13, 0.65 + 0.14 * len(series))
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(1, len(plot.series), sharey=True, squeeze=False)[0]
    thick = 0.8 / len(series)
    for place, (axes, (panel, found)) in enumerate(zip(grid, plot.series.items(), strict=True)):
        means = [value.mean for values in found.values() for value in values.values() if value.is_known]
        scale, unit = scaled_unit(max(means), plot.units[panel])
        for number, (name, values) in enumerate(found.items()):
            where = np.arange(len(names)) - 0.4 + thick * (number + 0.5)
            chosen = [values.get(group, MeanStd()) for group in names]
            _bar_row(axes, where, chosen, scale, thick, COLOURS[number], name)
            for y, (group, of) in zip(where, plot.sizes.items(), strict=True):
                if group in values:
                    _bar_note(axes, values[group].mean / scale, values[group].count, of, y)
        axes.set_xlabel(f"{panel} ({unit})")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlim(left=0)
        axes.margins(x=0.18)
        if place == 0:
            _row_names(axes, names)
        axes.grid(False, axis="y")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", frameon=False, borderaxespad=0.0, labelspacing=0.25)
    return figure


def _bar_row(
    axes: Axes, where: Any, values: Sequence[MeanStd], scale: float, thick: float, colour: str, name: str
) -> None:
    means, stds = np.array([value.mean for value in values]) / scale, np.array([value.std for value in values]) / scale
    hatch = None if colour == COLOURS[0] else "////"
    axes.barh(
        where, np.nan_to_num(means), thick, color=colour, label=name, hatch=hatch, edgecolor="white", linewidth=0.3
    )
    axes.errorbar(means, where, xerr=stds, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)


def _bar_note(axes: Axes, mean: float, count: int, of: int, y: float) -> None:
    """Write how many runs reached the target, if not all did."""
    if count < of:
        text, x = f"{count}/{of}", 0.0 if math.isnan(mean) else mean
        axes.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=SMALL - 1)


def _boxes(plot: Boxes) -> Figure:
    names = list(plot.values)
    tenths = plot.worst_tenths
    figure = Figure(figsize=(WIDTH, height_of_rows(len(names), 0.2, 0.75 if tenths else 0.55)))
    axes = figure.subplots()
    largest = max(float(np.max(np.abs(values))) for values in plot.values.values())
    scale, unit = (1.0, "") if plot.x_unit is None else scaled_unit(largest, plot.x_unit)
    for y, name in enumerate(names):
        _box(axes, y, plot.values[name] / scale)
    if tenths:
        x = [tenths[name] / scale for name in names]
        axes.scatter(x, range(len(names)), 18, WORST, marker="D", zorder=4, label="worst tenth")
        figure.legend(loc="outside upper left", frameon=False, borderaxespad=0.0)
    _row_names(axes, names)
    axes.set_xlabel(f"{plot.x_label} ({unit})" if unit else plot.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure


def _box(axes: Axes, y: int, values: Any) -> None:
    """Draw quartiles, median, whiskers of 1.5 times their distance, and the values outside."""
    box = boxplot_stats(values, whis=1.5)[0]
    axes.hlines(y, box["whislo"], box["whishi"], color=INK, linewidth=0.7)
    axes.barh(y, box["q3"] - box["q1"], 0.6, left=box["q1"], color=SOFT, edgecolor=INK, linewidth=0.7, zorder=2)
    axes.vlines(box["med"], y - 0.3, y + 0.3, color=INK, linewidth=1.4, zorder=3)
    axes.plot(box["fliers"], np.full(len(box["fliers"]), y), ".", color=INK, markersize=2.5, linestyle="none")
