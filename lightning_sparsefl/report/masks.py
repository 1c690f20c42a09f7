"""Figure of the masks of one module."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_sparsefl.report.figure_style import SMALL, TINY, WIDTH, set_title, without_common_parts

_COLUMNS, _MAX_LAYERS, _SIDE = 4, 32, 96
"""Maximum numbers of columns of the figure, of layers, and of pixels of the side of a layer."""


def mask_figure(masks: Mapping[str, Tensor], epoch: int, unit: str = "epoch") -> Figure:
    """Draw the mask of each layer as an image with one row per output, dark where weights are kept.

    A large layer is drawn as the densities of its blocks.

    Args:
        masks: Masks by tensor name, in the order of the model, or fractions of clients that keep each weight; the first
            32 are drawn.
        epoch: Number of the epoch, for the title.
        unit: Word for `epoch` in the title.
    """
    masks = {name: mask for name, mask in masks.items() if mask.numel()}
    shown = dict(list(masks.items())[:_MAX_LAYERS])
    columns = max(1, min(_COLUMNS, len(shown)))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 1.2 * rows), layout="constrained")
    grid = figure.subplots(max(1, rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, name, mask in zip(grid.flat, without_common_parts(list(shown)), shown.values(), strict=False):
        axes.imshow(blocks(mask).numpy(), vmin=0, vmax=1, cmap="Greys", interpolation="nearest", aspect="auto")
        axes.set_title(name, fontsize=TINY)
    left = len(masks) - len(shown)
    shared = any(mask.is_floating_point() for mask in shown.values())
    what = "Weights kept by all clients (black)" if shared else "Kept weights (black)"
    title = f"{what}, {unit} {epoch}" + (f" ({left} more layers)" if left else "")
    if shown:
        figure.suptitle(title, fontsize=SMALL + 1)
    else:
        set_title(grid[0][0], title)
    return figure


def blocks(mask: Tensor) -> Tensor:
    """Compute the densities of the blocks of a mask, at most 96 by 96, with the outputs as rows.

    Args:
        mask: Mask, bool, or fractions of clients, float, of any shape; the first dimension is that of the outputs.

    Example:
        >>> import torch
        >>> blocks(torch.tensor([[True, False], [True, True]]))
        tensor([[1., 0.],
                [1., 1.]])
    """
    table = mask.detach().cpu().reshape(mask.shape[0] if mask.dim() else 1, -1).float()
    height, width = (max(1, min(_SIDE, size)) for size in table.shape)
    return adaptive_avg_pool2d(table[None, None], (height, width))[0, 0]
