"""Figure of a module's sensitivity to the pruning of single layers; imported on use, as all that needs matplotlib."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from lightning_sparsefl.sparse.layer_sensitivity import Sensitivity


def sensitivity_figure(result: Sensitivity, metric: str = "score") -> Figure:
    """Draw the score against the density of the pruned layer, with a curve for each layer.

    Args:
        result: Scores from :func:`lightning_sparsefl.sparse.sensitivity`.
        metric: Name of the score, for the axis.
    """
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(result.dense, color="0.5", linewidth=1, linestyle="--", label="dense")
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.92, len(result.scores)))  # first to last layer
    for colour, (name, scores) in zip(colours, result.scores.items(), strict=True):
        axes.plot(result.densities, scores, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
    ticks = sorted(set(result.densities))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("density of the pruned layer (fraction kept)", fontsize=8)
    axes.set_ylabel(metric, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
