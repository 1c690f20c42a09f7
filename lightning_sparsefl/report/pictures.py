"""Pictures for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from lightning_sparsefl.sparse.masks import overlap
from lightning_sparsefl.types import Masks

_INK = "#23395b"
_MOST_CLIENTS = 64


def mask_overlap(masks: Mapping[int, Masks]) -> Tensor:
    """Jaccard overlap of every pair of clients' masks, shape (K, K), in [0, 1].

    Args:
        masks: By client number.
    """
    clients = list(masks)
    table = torch.eye(len(clients))
    for row, a in enumerate(clients):
        for column, b in enumerate(clients[:row]):
            table[row, column] = table[column, row] = overlap(masks[a], masks[b])
    return table


def overlap_figure(masks: Mapping[int, Masks], round: int) -> Figure:  # noqa: A002
    """The mask overlap between clients as a heat map; at most 64 clients are shown.

    Args:
        masks: By client number.
        round: Named in the title.
    """
    shown = {client: masks[client] for client in list(masks)[:_MOST_CLIENTS]}
    table = mask_overlap(shown)
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(table.numpy(), vmin=_floor(table), vmax=1.0, cmap=mpl.colormaps["viridis"])
    figure.colorbar(image, ax=axes, label="Jaccard overlap (1 = same mask)")
    step = max(1, len(shown) // 16)
    ticks = list(range(0, len(shown), step))
    labels = [str(list(shown)[tick]) for tick in ticks]
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set(xlabel="client", ylabel="client", title=f"Mask overlap between clients, after round {round}")
    return figure


def _floor(table: Tensor) -> float:
    """A lower end of the colours that lets differences be seen, rounded down to a tenth."""
    return float((table.min() * 10 - 1e-6).floor().clamp_min(0) / 10)


def density_figure(densities: Mapping[str, float], round: int) -> Figure:  # noqa: A002
    """Mean density per layer as a bar chart.

    Args:
        densities: By tensor name, in the model's order.
        round: Named in the title.
    """
    names = list(densities)
    figure = Figure(figsize=(7.2, max(2.4, 0.34 * len(names) + 1.2)), layout="constrained")
    axes = figure.add_subplot()
    positions = list(range(len(names)))
    bars = axes.barh(positions, [densities[name] for name in names], color=_INK, height=0.7)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(positions, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set(xlabel="density (fraction of weights kept)", title=f"Density per layer, round {round}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def score_values(personal: Mapping[int, Mapping[str, float]], name: str) -> Tensor:
    """One metric of every client, in client order, for a histogram: float64 of shape (clients,)."""
    return torch.tensor([metrics[name] for metrics in personal.values() if name in metrics], dtype=torch.float64)


def pixels(figure: Figure) -> Tensor:
    """The figure as an image, uint8 of shape (3, height, width), sharp enough for TensorBoard's enlarged view."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(120)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy()).permute(2, 0, 1)
