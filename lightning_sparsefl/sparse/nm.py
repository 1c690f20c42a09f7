"""N:M masks: of every M consecutive weights N are kept, a pattern that hardware can multiply faster than a dense one.

Mishra et al., "Accelerating sparse deep neural networks", arXiv:2104.08378. A linear layer whose rows have a 2:4 mask
runs on the sparse tensor cores of a GPU once its weight has gone through ``torch.sparse.to_sparse_semi_structured``
(float16, bfloat16 or int8, sizes in multiples that PyTorch names). The paper's search for a better order of the
channels is not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Masks, Weights


def nm_masks(scores: Weights, n: int = 2, m: int = 4, dim: int | None = None) -> dict[str, Tensor]:
    """Keep the `n` largest scores of every `m` consecutive ones; of equal ones the lower index, NaN is the smallest.

    Args:
        scores: Scores by name, tensors of two or more dimensions, the first of them the outputs.
        n: Number of weights kept of a group, 1 to `m`.
        m: Length of a group.
        dim: Dimension along which groups lie: None = along all dimensions but the first, flattened, which is how a
            linear layer, or a convolution written as one, multiplies; 1 = along input channels, which is how TensorRT
            convolves.

    Returns:
        A mask for each tensor, of density ``n / m`` exactly.

    Raises:
        InvalidOption: If `n` or `m` is out of range, or a tensor cannot be cut into groups.

    Example:
        >>> nm_masks({"w": torch.tensor([[4.0, 1.0, 3.0, 2.0, 5.0, 5.0, 5.0, 0.0]])})["w"].int()
        tensor([[1, 0, 1, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    _require_pattern(n, m)
    masks = {}
    for name, score in scores.items():
        if not divides(score.shape, m, dim):
            raise InvalidOption(
                f"`{name}` of shape {tuple(score.shape)} has {_length(score.shape, dim)} weights in a row "
                f"(`dim={dim}`), which cannot be cut into groups of `m={m}`; leave the layer dense, or choose another "
                "`dim` or `m`."
            )
        ranked = score.detach()
        if ranked.is_floating_point():
            ranked = torch.where(ranked.isnan(), -torch.inf, ranked)
        groups = _grouped(ranked, m, dim)
        first = groups.argsort(dim=-1, descending=True, stable=True)[..., :n]
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, first, True).flatten(-2)
        masks[name] = kept.reshape(score.shape) if dim is None else kept.movedim(-1, dim).contiguous()
    return masks


def is_nm(masks: Masks, n: int = 2, m: int = 4, dim: int | None = None) -> bool:
    """Return whether every mask keeps at most `n` of every `m` consecutive positions, in groups as in :func:`nm_masks`.

    Example:
        >>> is_nm({"w": torch.tensor([[True, False, True, False]])}), is_nm({"w": torch.ones(1, 4, dtype=torch.bool)})
        (True, False)
    """
    _require_pattern(n, m)
    return all(
        divides(mask.shape, m, dim) and bool((_grouped(mask, m, dim).sum(-1) <= n).all()) for mask in masks.values()
    )


def divides(shape: Sequence[int], m: int = 4, dim: int | None = None) -> bool:
    """Return whether a tensor of this shape can be cut into groups of `m`.

    Example:
        >>> divides((8, 16, 3, 3)), divides((8, 3, 3, 3)), divides((8, 4, 3, 3), dim=1)
        (True, False, True)
    """
    return len(shape) > (1 if dim is None else dim) and _length(shape, dim) % m == 0


def _length(shape: Sequence[int], dim: int | None) -> int:
    """Return the number of weights in a row; 1 if the tensor has no such dimension."""
    return math.prod(shape[1:]) if dim is None else shape[dim] if len(shape) > dim else 1


def _grouped(value: Tensor, m: int, dim: int | None) -> Tensor:
    rows = value.flatten(1) if dim is None else value.movedim(dim, -1)
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // m, m)


def _require_pattern(n: int, m: int) -> None:
    if not 1 <= n <= m:
        raise InvalidOption(f"`n={n}`, `m={m}`: expected 1 <= n <= m.")
