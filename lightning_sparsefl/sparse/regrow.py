"""Selection of the weights to bring back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.prune import keep_largest_among, score_of
from lightning_sparsefl.types import Masks, Weights


def regrow(scores: Weights, masks: Masks, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Add to each mask the largest scores among the positions it does not keep, up to ``counts[name]``.

    A position that was dropped a moment ago may return, as in RigL (Evci et al., ICML 2020). Of equal scores
    the lower index returns first. A mask without a count stays as it is.

    Args:
        scores: Scores for every tensor of `masks`, same shapes.
        masks: Masks of what is kept now.
        counts: Number of positions of each mask to keep afterwards.

    Raises:
        InvalidOption: If a count is less than is kept already, or more than the tensor has.
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> import torch
        >>> masks = {"w": torch.tensor([True, False, False])}
        >>> regrow({"w": torch.tensor([9.0, 1.0, 2.0])}, masks, {"w": 2})
        {'w': tensor([ True, False,  True])}
    """
    return {
        name: _fill(score_of(scores, name, mask), mask, counts[name], name) if name in counts else mask
        for name, mask in masks.items()
    }


def _fill(score: Tensor, mask: Tensor, count: int, name: str) -> Tensor:
    kept = int(torch.count_nonzero(mask))
    if not kept <= count <= mask.numel():
        expected = f"{kept} (kept already) to {mask.numel()}"
        raise InvalidOption(f"`counts[{name!r}]={count}`: expected {expected}.")
    return mask | keep_largest_among(score, ~mask, count - kept)
