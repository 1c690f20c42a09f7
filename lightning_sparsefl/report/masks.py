"""Where the weights of one module are zero."""

from __future__ import annotations

from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_sparsefl.report.pictures import _SMALL, _TINY, _WIDTH, _short, _title
from lightning_sparsefl.types import Masks

_COLUMNS, _MOST_LAYERS, _SIDE = 4, 32, 96
"""Of the picture; layers in it; pixels of a layer's longer side."""


def mask_figure(masks: Masks, epoch: int) -> Figure:
    """Each layer's mask as an image: a row for an output, dark where weights are kept.

    A large layer is shown by the density of its blocks.

    Args:
        masks: By tensor name, in the model's order; the first 32 are drawn.
        epoch: Named in the title.
    """
    shown = dict(list(masks.items())[:_MOST_LAYERS])
    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH, 0.5 + 1.2 * rows), layout="constrained")
    grid = figure.subplots(max(1, rows), _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, name, mask in zip(grid.flat, _short(list(shown)), shown.values(), strict=False):
        axes.imshow(blocks(mask).numpy(), vmin=0, vmax=1, cmap="Greys", interpolation="nearest", aspect="auto")
        axes.set_title(name, fontsize=_TINY)
    left = len(masks) - len(shown)
    title = f"Kept weights, epoch {epoch}" + (f" ({left} layers more)" if left else "")
    if shown:
        figure.suptitle(title, fontsize=_SMALL + 1)
    else:
        _title(grid[0][0], title)
    return figure


def blocks(mask: Tensor) -> Tensor:
    """Densities of the blocks of a mask, its outputs against all else, at most 96 a side.

    Example:
        >>> import torch
        >>> blocks(torch.tensor([[True, False], [True, True]]))
        tensor([[1., 0.],
                [1., 1.]])
    """
    table = mask.detach().cpu().reshape(mask.shape[0] if mask.dim() else 1, -1).float()
    height, width = (max(1, min(_SIDE, size)) for size in table.shape)
    return adaptive_avg_pool2d(table[None, None], (height, width))[0, 0]
