"""Figures of docs/results.md: accuracy against rounds, bytes, FLOPs and simulated seconds, from the CSV files alone.

One PNG for each data set, of the setting with the most methods, if two of them have a curve. A line is the mean over
seeds, with a band of one standard deviation. Colours show the paper's method, FedAvg, the best two, and the best of the
others with a curve; all others are grey. A run from before there were curves is a single marker. So is the accuracy
after fine-tuning, where models are fine-tuned at the end.

    python benchmarks/paper/figures.py

It writes the figures to docs/images/, and what shows them to docs/results.md.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _data_sets import BASELINE, DATA_SETS, Group, Method, Point, groups, main_group
from _rows import DOCUMENT, RESULTS
from _tables import with_table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from lightning_sparsefl.report.measures.mean_std import mean_std
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.plots.style import INK, look, styled
from lightning_sparsefl.report.shortened import short

IMAGES = DOCUMENT.parent / "images"
AXES = {
    "rounds": ("communication round", None),
    "bytes": ("bytes, both ways", "B"),
    "flops": ("training FLOPs", "FLOP"),
    "simulated": ("simulated time", "s"),
}
"""Label and unit of a field of a point."""
HIGHLIGHTED = 7
"""Largest number of methods with a colour of their own."""
DEPTH = 0.2
"""Largest distance from the start of the axis of accuracies to the lowest accuracy at an end."""
OTHERS: dict[str, Any] = {"color": "#bdbdbd", "linewidth": 0.8, "marker": "o", "markersize": 2, "zorder": 1}
TUNED: dict[str, Any] = {"marker": "*", "markersize": 6}
_WIDTH, _HEIGHT, _LEGEND, _DPI = 6.8, 1.9, 0.16, 140
"""Inches of the figure, of a row of panels, and of one of two lines of the legend; dots per inch."""
_COLUMNS = 4
"""Columns of the legend."""


def highlighted(methods: Mapping[str, Method], own: str) -> list[str]:
    """Return the keys of the methods with a colour: the paper's, FedAvg, the best two, then the best with a curve.

    Args:
        methods: Methods by key.
        own: Key of the paper's method.
    """
    ends = {key: mean_std(points[-1].accuracy for points in one.seeds.values()).mean for key, one in methods.items()}
    best = sorted(methods, key=lambda key: -ends[key])
    others = sorted(best, key=lambda key: not methods[key].has_curve)  # stable: the best first
    wanted = dict.fromkeys([own, BASELINE, *best[:2], *others])
    return [key for key in wanted if key in methods][:HIGHLIGHTED]


def draw(group: Group, tuned: Group | None = None) -> Figure:
    """Draw accuracy against rounds and each cost that is known.

    Args:
        group: Methods with their curves.
        tuned: The same methods with their accuracies after fine-tuning; None if models are not fine-tuned.
    """
    known = [name for name in AXES if any(getattr(end, name) is not None for end in _ends(group))]
    chosen = highlighted(group.methods, group.data_set.own)
    columns = 3 if len(known) == 3 else 2
    rows = math.ceil(len(known) / columns)
    with styled():
        figure = Figure(figsize=(_WIDTH, rows * _HEIGHT + 2 * _LEGEND))
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        for axes, name in zip(grid, known, strict=True):
            _panel(axes, group, name, chosen, tuned)
        for axes in grid[::columns]:
            axes.set_ylabel(f"{group.metric.partition('/')[0]} test accuracy")
        grid[0].set_ylim(bottom=_bottom(group))
        handles = dict(zip(*grid[0].get_legend_handles_labels()[::-1], strict=True))
        if tuned is not None:
            handles["after fine-tuning"] = Line2D([], [], **TUNED, color=INK, linestyle="none")
        figure.legend(handles.values(), handles, loc="outside upper left", ncols=_COLUMNS, frameon=False)
    return figure


def _bottom(group: Group) -> float | None:
    """Return where the axis of accuracies starts if the first rounds would take most of it; None for their lowest."""
    runs = [points for method in group.methods.values() for points in method.seeds.values()]
    cut = min(end.accuracy for end in _ends(group)) - DEPTH
    return cut if min(point.accuracy for points in runs for point in points) < cut else None


def _ends(group: Group) -> list[Point]:
    return [points[-1] for method in group.methods.values() for points in method.seeds.values()]


def _panel(axes: Axes, group: Group, name: str, chosen: Sequence[str], tuned: Group | None) -> None:
    label, unit = AXES[name]
    largest = max(getattr(end, name) or 0 for end in _ends(group))
    scale, prefixed = (1.0, "") if unit is None else scaled_unit(largest, unit)
    for key in [*chosen, *(key for key in group.methods if key not in chosen)]:
        style = look(chosen.index(key)) if key in chosen else OTHERS
        text = short(group.methods[key].label.replace("`", ""), 30) if key in chosen else "others"
        _line(axes, group.methods[key], name, scale, {**style, "label": text})
        if tuned is not None and key in tuned.methods:
            _line(axes, tuned.methods[key], name, scale, {**style, **TUNED})
    axes.set_xlabel(f"{label} ({prefixed})" if prefixed else label)
    axes.set_xlim(left=0)


def _line(axes: Axes, method: Method, name: str, scale: float, style: Mapping[str, Any]) -> None:
    """Draw the mean over the seeds with the most points, and a band of one standard deviation."""
    most = max(map(len, method.seeds.values()))
    runs = [points for points in method.seeds.values() if len(points) == most]
    together = [part for part in zip(*runs, strict=True) if all(getattr(point, name) is not None for point in part)]
    x = [statistics.fmean(getattr(point, name) / scale for point in part) for part in together]
    y = [mean_std(point.accuracy for point in part) for part in together]
    if len(x) == 1:
        style = {"zorder": 3, **style, "linestyle": "none"}
    axes.plot(x, [one.mean for one in y], markevery=max(1, len(x) // 6), **style)
    if len(runs) > 1 and len(x) > 1:
        low, high = ([one.mean + sign * one.std for one in y] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def png(figure: Figure) -> bytes:
    """Return a figure as PNG; equal figures give equal bytes with one version of matplotlib."""
    file = io.BytesIO()
    with styled():
        figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(method=Image.Quantize.FASTOCTREE).save(small, "png", optimize=True)
    return small.getvalue()


def draw_all(results: Path = RESULTS, images: Path = IMAGES) -> str:
    """Write all figures, and return the Markdown that shows them.

    Args:
        results: Folder of the CSV files.
        images: Folder of the figures.
    """
    shown = []
    for data_set in DATA_SETS:
        found = groups(data_set, score="final", folder=results)
        group = main_group(found)
        if sum(method.has_curve for method in group.methods.values()) < 2:
            continue
        tuned = groups(data_set, folder=results)[found.index(group)] if data_set.score == "after" else None
        images.mkdir(parents=True, exist_ok=True)
        (images / f"{data_set.script}.png").write_bytes(png(draw(group, tuned)))
        title = f"{data_set.name} ({group.setting}): accuracy against rounds and costs"
        shown.append(f"{title}\n\n![{title}](images/{data_set.script}.png)")
    return "\n\n".join(shown)


def write() -> None:
    """Write all figures, and what shows them to the document."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), "figures", draw_all()))


if __name__ == "__main__":
    argparse.ArgumentParser(description="Draw the figures of docs/results.md.").parse_args()
    write()
