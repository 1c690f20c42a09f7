"""Figures for TensorBoard, in the width of its cards and with a resolution for enlarging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from lightning_sparsefl.report.figure_style import (
    DPI,
    GRID,
    INK,
    SMALL,
    TINY,
    WARM,
    WIDTH,
    plain_axes,
    set_title,
    without_common_parts,
)

_MAX_NAMED = 24
"""Maximum number of clients whose numbers are shown below their dots."""
_MAX_BARS = 72
"""Maximum number of layers with one line of text for each bar."""


def overlap_figure(clients: Sequence[int], overlaps: Tensor, round: int, of: int | None = None) -> Figure:
    """Draw the overlap of masks between clients as a heat map.

    The colour scale covers the overlaps between different clients; the diagonal is left out.

    Args:
        clients: Numbers of the clients.
        overlaps: Overlaps in the order of `clients`, from :func:`lightning_sparsefl.report.overlap.mask_overlap`.
        round: Number of the round, for the title.
        of: Number of all clients, for the title if not all are drawn; default: the length of `clients`.
    """
    of = len(clients) if of is None else of
    table = overlaps.clone().fill_diagonal_(torch.nan).numpy()
    figure = Figure(figsize=(WIDTH, 0.86 * WIDTH), layout="constrained")
    axes = figure.add_subplot()
    low, high = _colour_range(table)
    colours = mpl.colormaps["viridis"].with_extremes(bad=GRID)
    image = axes.imshow(table, vmin=low, vmax=high, cmap=colours, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, fraction=0.05)
    bar.set_label("Jaccard overlap (1 = same mask)", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    ticks = range(0, len(clients), max(1, -(-len(clients) // 10)))
    labels = [str(clients[tick]) for tick in ticks]
    axes.set_xticks(list(ticks), labels, fontsize=SMALL)
    axes.set_yticks(list(ticks), labels, fontsize=SMALL)
    axes.set_xlabel("client", fontsize=SMALL)
    shown = "" if len(clients) >= of else f": {len(clients)} of {of}"
    set_title(axes, f"Mask overlap of clients, round {round}{shown}")
    return figure


def _colour_range(table: np.ndarray) -> tuple[float, float]:
    """Compute the ends of the colour scale: the range of the table, widened to multiples of 0.05, and never empty."""
    found = table[~np.isnan(table)]
    low = np.floor(found.min(initial=1.0) * 20 + 1e-6) / 20
    high = np.ceil(found.max(initial=0.0) * 20 - 1e-6) / 20
    return (float(low), float(high)) if high > low else (max(0.0, float(high) - 0.05), float(high) or 0.05)


def density_figure(densities: Mapping[str, float], round: int, unit: str = "round") -> Figure:
    """Draw the mean density of each layer as a bar chart.

    Args:
        densities: Densities by tensor name, in the order of the model.
        round: Number of the round, for the title.
        unit: Word for `round` in the title.
    """
    names, values = without_common_parts(list(densities)), list(densities.values())
    spacious, crowded = len(names) <= 16, len(names) > _MAX_BARS
    pitch = 0.28 if spacious else 0.17 * min(1, _MAX_BARS / len(names))
    size = SMALL if spacious else TINY
    figure = Figure(figsize=(WIDTH, max(1.5, pitch * len(names) + 0.8)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(range(len(names)), values, color=INK, height=0.72)
    if not crowded:
        axes.bar_label(bars, labels=[_density(value) for value in values], padding=3, fontsize=size)
    ticks = range(0, len(names), -(-len(names) // _MAX_BARS))
    axes.set_yticks(list(ticks), [names[tick] for tick in ticks], fontsize=size)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.set_xlim(0, 1.14)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("density (fraction of weights kept)", fontsize=SMALL)
    plain_axes(axes, "x")
    set_title(axes, f"Density per layer, {unit} {round}")
    return figure


def _density(value: float) -> str:
    """Format a density with two decimals, or two digits below 0.1.

    Example:
        >>> _density(0.85), _density(0.0123)
        ('0.85', '0.012')
    """
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def clients_figure(scores: Mapping[int, float], name: str, round: int, rising: bool = True) -> Figure:
    """Draw one metric of each client as a dot, worst first, with the mean and the worst tenth.

    Args:
        scores: Values of the metric by client number.
        name: Name of the metric.
        round: Number of the round, for the title.
        rising: Whether higher is better.
    """
    clients = sorted(scores, key=lambda client: scores[client], reverse=not rising)
    values = [scores[client] for client in clients]
    worst = max(1, -(-len(values) // 10))
    mean, tenth = sum(values) / len(values), sum(values[:worst]) / worst
    figure = Figure(figsize=(WIDTH, 0.7 * WIDTH), layout="constrained")
    axes = figure.add_subplot()
    size = 30 if len(clients) <= _MAX_NAMED else 10
    axes.axhline(mean, color=INK, linewidth=1, linestyle="--", label=f"mean {mean:.3f}")
    axes.scatter(range(worst), values[:worst], size, WARM, zorder=3, clip_on=False, label=f"worst tenth {tenth:.3f}")
    axes.scatter(range(worst, len(values)), values[worst:], size, INK, zorder=3, clip_on=False)
    axes.legend(fontsize=SMALL, frameon=False, loc="lower right" if rising else "upper right")
    if rising and max(values) <= 1:
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))
    axes.tick_params(labelsize=SMALL)
    if len(clients) <= _MAX_NAMED:
        axes.set_xticks(range(len(clients)), [str(client) for client in clients], fontsize=TINY)
        axes.set_xlabel("client, worst first", fontsize=SMALL)
    else:
        axes.set_xlabel(f"{len(clients)} clients, worst first", fontsize=SMALL)
    plain_axes(axes, "y")
    set_title(axes, f"{name} of the clients, round {round}")
    return figure


def pixels(figure: Figure) -> Tensor:
    """Render a figure as an image, uint8 of shape (3, height, width)."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy()).permute(2, 0, 1)
