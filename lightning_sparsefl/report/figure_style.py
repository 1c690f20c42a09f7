"""Style of the figures for TensorBoard: size, colours, fonts, titles and axes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

WIDTH, DPI = 4.4, 200
"""Width in inches and dots per inch. A card shows about 80 dots per inch, so 9 points are 10 dots there."""
INK, WARM, GRID = "#23395b", "#d1495b", "#d7dbe0"
"""Colours of data, of data that stand out, and of grid lines."""
SMALL, TINY = 9, 7
"""Font sizes in points."""


def set_title(axes: Axes, text: str) -> None:
    """Set the title of axes, at their left.

    Args:
        axes: Axes.
        text: Title.
    """
    axes.set_title(text, fontsize=SMALL + 1, loc="left")


def plain_axes(axes: Axes, grid: str) -> None:
    """Draw thin grid lines behind the data for one axis, and no frame.

    Args:
        axes: Axes.
        grid: Axis with grid lines, ``"x"`` or ``"y"``.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def without_common_parts(names: Sequence[str]) -> list[str]:
    """Remove the dotted parts that are common to all names at the start and at the end.

    Args:
        names: Names of tensors.

    Example:
        >>> without_common_parts(["net.conv1.weight", "net.layer.fc.weight"])
        ['conv1', 'layer.fc']
    """
    parts = [name.split(".") for name in names]
    for end in (0, -1):
        while len(names) > 1 and min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            for part in parts:
                part.pop(end)
    return [".".join(part) for part in parts]
