"""Style of the figures: the width of a paper's column, readable fonts, and colours that the colour-blind tell apart."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_sparsefl.report.shortened import short

WIDTH = 3.4
"""Width in inches of a column of a paper with two."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Colours of Okabe and Ito (2008) without yellow, which is too light for lines on paper."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "os^Dv"
"""Line styles and markers. Their numbers and that of the colours share no divisor: 140 combinations before a repeat."""
INK, SOFT, WORST = "#222222", "#d9d9d9", "#d55e00"
FONT, SMALL = 8.0, 7.0
"""Font sizes in points."""
FORMATS = ("png", "pdf", "svg")
_DPI = 300
_SETTINGS: dict[str, Any] = {
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": SOFT,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,  # a name of a run is text, also with dollars
    "pdf.fonttype": 42,  # fonts as publishers ask for them
    "svg.fonttype": "path",
    "svg.hashsalt": "lightning-sparsefl",  # equal runs make equal files
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
}
_PROGRAM = ("backend", "interactive", "toolbar", "webagg", "tk.", "macosx", "keymap", "figure.hooks")
"""First words of settings that have no effect on files."""
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


def styled() -> Any:
    """Return a context in which figures have the style of a report, whatever the user's settings are."""
    defaults: dict[Any, Any] = {n: value for n, value in mpl.rcParamsDefault.items() if not n.startswith(_PROGRAM)}
    return mpl.rc_context(defaults | _SETTINGS)


def look(place: int) -> dict[str, Any]:
    """Return the colour, the line style and the marker of a group.

    Args:
        place: Place of the group in the report.
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def short_names(names: Sequence[str], most: int = 34) -> list[str]:
    """Return names that fit into a figure and differ; those that would be equal are numbered in their order.

    A class of another package loses the path of its module, unless two names would then be equal.

    Args:
        names: Different names of groups.
        most: Maximum number of characters.

    Example:
        >>> short_names(["mine.Method (rounds=4, density=0.1)", "mine.Method (rounds=8, density=0.1)"], most=24)
        ['1: Method (...nsity=0.1)', '2: Method (...nsity=0.1)']
    """
    without_path = [re.sub(r"^(?:\w+\.)+(?=[A-Z_a-z]\w*(?: \(|,|$))", "", name) for name in names]
    plain = without_path if len(set(without_path)) == len(set(names)) else names
    cut = Counter(short(name, most) for name in plain)
    places = {name: place for place, name in enumerate(plain, 1)}
    return [
        short(name, most) if cut[short(name, most)] == 1 else f"{places[name]}: {short(name, most - 3)}"
        for name in plain
    ]


def height_of_rows(count: int, pitch: float = 0.17, rest: float = 0.55) -> float:
    """Return the height in inches of a figure with one row for each group.

    Args:
        count: Number of rows.
        pitch: Height of a row.
        rest: Height of everything else.
    """
    return rest + pitch * max(count, 2)


def no_grid(axes: Axes) -> None:
    """Remove the grid and the ticks' marks, as for a table of colours."""
    axes.grid(False)
    axes.tick_params(length=0)


def render(figure: Figure) -> dict[str, bytes]:
    """Render a figure in all formats; equal figures give equal bytes.

    Args:
        figure: Figure.

    Returns:
        Content of the file, by its extension.
    """
    contents = {}
    for kind in FORMATS:
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=_DPI, metadata=_METADATA[kind])
        figure.set_layout_engine("none")  # the layout is slow to compute, and in fractions of the figure
        contents[kind] = file.getvalue()
    return contents
