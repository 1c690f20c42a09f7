"""Selection of the weights to bring back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.prune import keep_largest_among, score_of
from lightning_sparsefl.types import Masks, Weights


def regrow(scores: Weights, masks: Masks, counts: Mapping[str, int], barred: Masks | None = None) -> dict[str, Tensor]:
    """Add to each mask the largest scores among the positions it does not keep, up to ``counts[name]``.

    A position that was dropped a moment ago may return, as in RigL (Evci et al., ICML 2020). Of equal scores
    the lower index returns first. A mask without a count stays as it is.

    Args:
        scores: Scores for every tensor of `masks`, same shapes.
        masks: Masks of what is kept now.
        counts: Number of positions of each mask to keep afterwards.
        barred: Masks of positions that may not be added, such as those that were just dropped; None = none of them.

    Raises:
        InvalidOption: If a count is less than is kept already, or more than the positions that may be kept.
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> import torch
        >>> masks = {"w": torch.tensor([True, False, False])}
        >>> regrow({"w": torch.tensor([9.0, 1.0, 2.0])}, masks, {"w": 2})
        {'w': tensor([ True, False,  True])}
    """
    grown = {}
    for name, mask in masks.items():
        free = ~mask if barred is None else ~(mask | barred[name])
        grown[name] = _fill(score_of(scores, name, mask), mask, free, counts[name], name) if name in counts else mask
    return grown


def grow_share(scores: Weights, masks: Masks, share: float, bound: float) -> dict[str, Tensor]:
    """Add to each mask the largest scores of a share of the positions it does not keep, as FedSelect does.

    The number is rounded to the nearest integer. A mask that keeps more than a bound stays as it is, so that the last
    step may exceed the bound (Tamirisa et al. 2024, arXiv:2404.02478).

    Args:
        scores: Scores for every tensor of `masks`, same shapes.
        masks: Masks of what is kept now.
        share: Fraction of the other positions to add, in [0, 1].
        bound: Fraction of a tensor's positions above which none are added, in [0, 1].

    Example:
        >>> import torch
        >>> masks = {"w": torch.tensor([True, False, False, False, False])}
        >>> scores = {"w": torch.tensor([0.0, 1.0, 4.0, 2.0, 3.0])}
        >>> grow_share(scores, masks, share=0.5, bound=0.8)
        {'w': tensor([ True, False,  True, False,  True])}
    """
    counts = {}
    for name, mask in masks.items():
        kept, size = int(torch.count_nonzero(mask)), mask.numel()
        counts[name] = kept if kept > bound * size else kept + math.floor(share * (size - kept) + 0.5)
    return regrow(scores, masks, counts)


def growth_counts(total: int, worth: Mapping[str, float], room: Mapping[str, int]) -> dict[str, int]:
    """Distribute positions to add over tensors, in proportion to a value of each, as far as they have room.

    What a tensor has no room for goes to the others. The numbers are rounded down, and what is left is added one by
    one in the order of the remainders, of which equal ones keep the order of `worth`. The rule of Babakniya et al.
    (arXiv:2208.13092), with the mean magnitude of a layer's weights as value.

    Args:
        total: Number of positions to add to all tensors together.
        worth: Value of each tensor, not negative; all tensors are equal if none is above 0.
        room: Number of positions that each tensor does not keep.

    Raises:
        InvalidOption: If the tensors have no room for `total` positions.

    Example:
        >>> growth_counts(10, {"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 4, "b": 9, "c": 9})
        {'a': 4, 'b': 3, 'c': 3}
    """
    if total > sum(room[name] for name in worth):
        raise InvalidOption(f"`total={total}`: expected at most {sum(room[name] for name in worth)}.")
    added = dict.fromkeys(worth, 0)
    left, open_to = total, list(worth)
    while left:
        values = {name: worth[name] for name in open_to}
        values = values if any(values.values()) else dict.fromkeys(open_to, 1.0)
        shares = {name: left * value / sum(values.values()) for name, value in values.items()}
        full = [name for name in open_to if shares[name] >= room[name]]
        if not full:
            added |= {name: math.floor(share) for name, share in shares.items()}
            by_remainder = sorted(open_to, key=lambda name: added[name] - shares[name])
            for name in by_remainder[: left - sum(added[name] for name in open_to)]:
                added[name] += 1
            break
        added |= {name: room[name] for name in full}
        left -= sum(room[name] for name in full)
        open_to = [name for name in open_to if name not in full]
    return added


def _fill(score: Tensor, mask: Tensor, free: Tensor, count: int, name: str) -> Tensor:
    kept, most = int(torch.count_nonzero(mask)), int(torch.count_nonzero(mask | free))
    if not kept <= count <= most:
        raise InvalidOption(f"`counts[{name!r}]={count}`: expected {kept} (kept already) to {most}.")
    return mask | keep_largest_among(score, free, count - kept)
