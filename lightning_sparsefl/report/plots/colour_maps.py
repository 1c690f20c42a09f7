"""Drawing of tables as colours."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.plots.data import Maps, Panel
from lightning_sparsefl.report.plots.style import INK, SMALL, WIDTH, WORST, no_grid, short_names
from lightning_sparsefl.report.shortened import short

_MOST_NAMES = 14
"""Maximum number of rows with a name each, of one panel or two; half of it in smaller panels."""
_BLANK = "#f2f2f2"
_LONGEST_TITLE = 50


def draw_maps(plot: Maps) -> Figure:
    """Draw tables as colours, one below the other, or two side by side if they are square.

    Args:
        plot: Data of the figure.
    """
    square = plot.x_label == plot.y_label
    columns = 2 if square and len(plot.panels) > 1 else 1
    rows = math.ceil(len(plot.panels) / columns)
    heights = [_height(plot.panels[row * columns], square, len(plot.panels)) for row in range(rows)]
    height = sum(heights) + (0.2 if plot.colour_label is None else 0.5)
    figure = Figure(figsize=(WIDTH, height), layout="compressed" if square else "constrained")
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    low, high = plot.limits or _limits(plot)
    scale, unit = (1.0, "") if plot.colour_unit is None else scaled_unit(high, plot.colour_unit)
    titles = short_names([panel.title for panel in plot.panels], 26 if columns > 1 else _LONGEST_TITLE)
    image: Any = None
    for place, axes in enumerate(grid.flat):
        if place >= len(plot.panels):
            axes.set_axis_off()
            continue
        image = _panel(axes, plot, plot.panels[place], scale, titles[place])
        image.set_clim(low / scale, high / scale)
        if place + columns >= len(plot.panels):
            axes.set_xlabel(plot.x_label)
    if plot.colour_label is not None:
        thick = 0.07 / height
        bar = figure.colorbar(image, ax=list(grid.flat), location="bottom", aspect=30, fraction=thick, pad=thick)
        bar.set_label(f"{plot.colour_label} ({unit})" if unit else plot.colour_label)
        bar.outline.set_linewidth(0.4)
    return figure


def _height(panel: Panel, square: bool, panels: int) -> float:
    """Return the height of a panel in inches."""
    if square:
        return 1.75 if panels > 1 else 2.6
    return 0.4 + min(1.5 if panels < 3 else 0.75, max(0.3, 0.15 * len(panel.row_names)))


def _limits(plot: Maps) -> tuple[float, float]:
    """Return the smallest and the largest value of all panels, apart from each other."""
    found = np.concatenate([panel.table[np.isfinite(panel.table)] for panel in plot.panels])
    if not len(found):
        return 0.0, 1.0
    low, high = float(found.min()), float(found.max())
    return (low, high) if high > low else (low - 0.05, high + 0.05)


def _panel(axes: Axes, plot: Maps, panel: Panel, scale: float, title: str) -> Any:
    filled = plot.colour_label is None
    colours = ListedColormap([INK]) if filled else mpl.colormaps["viridis"]
    image = axes.imshow(
        panel.table / scale,
        cmap=colours.with_extremes(bad=_BLANK),
        aspect="equal" if plot.x_label == plot.y_label else "auto",
        interpolation="nearest",
    )
    no_grid(axes)
    axes.set_title(title, loc="left", fontsize=SMALL)
    axes.set_ylabel(plot.y_label)
    _ticks(axes, panel, _MOST_NAMES if len(plot.panels) < 3 else _MOST_NAMES // 2)
    if panel.marks:
        rows, columns = zip(*panel.marks, strict=True)
        axes.plot(columns, rows, "x", color=WORST, markersize=3, linestyle="none")
    if plot.shows_last and len(panel.row_names) <= _MOST_NAMES:
        _last_values(axes, panel)
    return image


def _ticks(axes: Axes, panel: Panel, most: int) -> None:
    """Name the rows and the columns, or some of them if there are many."""
    every = math.ceil(len(panel.row_names) / most)
    places = range(0, len(panel.row_names), every)
    axes.set_yticks(list(places), [short(panel.row_names[place], 24) for place in places])
    every = math.ceil(len(panel.column_names) / 8)
    places = range(0, len(panel.column_names), every)
    axes.set_xticks(list(places), [panel.column_names[place] for place in places])


def _last_values(axes: Axes, panel: Panel) -> None:
    for row, values in enumerate(panel.table):
        known = values[np.isfinite(values)]
        if len(known):
            text = f"{known[-1]:.2f}" if known[-1] >= 0.1 else f"{known[-1]:.2g}"
            axes.annotate(
                text, (1, row), (3, 0), ("axes fraction", "data"), "offset points", fontsize=SMALL, va="center"
            )
