"""Selection of the weights to drop: exact counts, the same answer on every run and device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.density import Shapes, ceil_count
from lightning_sparsefl.types import Masks, Weights


def keep_largest(score: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest scores; of equal ones the lower index stays, NaN is the smallest.

    Args:
        score: Scores of any shape, n elements.
        count: Number of positions to keep, 0 to n.

    Returns:
        Bool, the shape of `score`, exactly `count` of them True.

    Raises:
        InvalidOption: If `count` is outside 0 to n.

    Example:
        >>> keep_largest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2)
        tensor([False,  True,  True, False])
    """
    return keep_largest_among(score, torch.ones_like(score, dtype=torch.bool), count)


def keep_largest_among(score: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest scores among the positions that a mask keeps.

    Args:
        score: Scores of any shape.
        mask: Bool tensor of the shape of `score`, with n positions True.
        count: Number of positions to keep, 0 to n.

    Returns:
        Bool, the shape of `score`, exactly `count` of them True.

    Raises:
        InvalidOption: If `count` is outside 0 to n.

    Example:
        >>> keep_largest_among(torch.tensor([9.0, 1.0, 2.0]), torch.tensor([False, True, True]), 1)
        tensor([False, False,  True])
    """
    size = int(torch.count_nonzero(mask))
    if not 0 <= count <= size:
        raise InvalidOption(f"`count={count}`: expected 0 to {size}, the positions that there are.")
    if count in (0, size):
        return mask.clone() if count else torch.zeros_like(mask)
    score, mask = score.detach().contiguous(), mask.contiguous()
    if score.is_floating_point() and bool(score.amax().isnan()):  # the check is cheaper than a copy
        score = torch.nan_to_num(score, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    threshold = _nth_largest(select(score, mask), count)
    keep = (score >= threshold).logical_and_(mask)
    excess = int(torch.count_nonzero(keep)) - count
    if excess:
        ties = ((score == threshold) & mask).view(-1).nonzero().reshape(-1)
        keep.view(-1)[ties[len(ties) - excess :]] = False
    return keep


def keep_largest_by(score: Tensor, tie: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest scores among a mask's positions, where `tie` decides between equal scores.

    Args:
        score: Scores of any shape.
        tie: Second scores, same shape; of equal ones the lower index stays.
        mask: Bool tensor of the same shape, with n positions True.
        count: Number of positions to keep, 0 to n.

    Raises:
        InvalidOption: If `count` is outside 0 to n.

    Example:
        >>> keep_largest_by(torch.tensor([9.0, 0.0, 0.0]), torch.tensor([1, 1, 2]), torch.ones(3, dtype=torch.bool), 2)
        tensor([ True, False,  True])
    """
    order = torch.sort(tie.flatten(), descending=True, stable=True).indices
    keep = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    keep[order] = keep_largest_among(score.flatten()[order], mask.flatten()[order], count)
    return keep.reshape(mask.shape)


def _nth_largest(values: Tensor, count: int) -> Tensor:
    """Return the value at place `count`, from 1 for the largest, of flat values without NaN; may reorder them."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.topk(count, sorted=False).values.min()
    lowest = values.amin()
    above = values > lowest
    places = int(torch.count_nonzero(above))
    if places < count:
        return lowest
    if places < len(values) - 1:  # numpy takes ten times as long where many are equal, as zeros of masked weights
        values = select(values, above)
    values.numpy().partition(len(values) - count)  # on a CPU several times faster than topk and kthvalue
    return values[len(values) - count]


def select(score: Tensor, mask: Tensor) -> Tensor:
    """Return a flat copy of the scores where a mask is True, in order.

    Example:
        >>> select(torch.tensor([4.0, 1.0, 2.0]), torch.tensor([True, False, True]))
        tensor([4., 2.])
    """
    score = score.detach()
    if mask.all():
        return score.flatten().clone()
    if score.device.type != "cpu" or score.dtype not in (torch.float32, torch.float64):
        return score.masked_select(mask)
    return torch.from_numpy(score.numpy().compress(mask.numpy().reshape(-1)))  # several times faster on a CPU


def prune(scores: Weights, masks: Masks, fraction: float) -> dict[str, Tensor]:
    """Drop, in each masked tensor, the ``ceil(fraction * kept)`` smallest scores among those it keeps.

    Of equal scores the higher index is dropped first. A tensor without a mask is not in the pool and stays
    dense; :func:`~lightning_sparsefl.sparse.masks.dense_like` starts the pruning of a dense model.

    Args:
        scores: Scores for every tensor of `masks`, same shapes; others are ignored.
        masks: Masks of what is kept now.
        fraction: Fraction of the kept positions to drop, in [0, 1].

    Raises:
        InvalidOption: If `fraction` is outside [0, 1].
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> prune({"w": torch.tensor([4.0, 1.0, 2.0])}, {"w": torch.tensor([True, False, True])}, 0.5)
        {'w': tensor([ True, False, False])}
    """
    if not 0 <= fraction <= 1:
        raise InvalidOption(f"`fraction={fraction}`: expected a number in [0, 1].")
    pruned = {}
    for name, mask in masks.items():
        kept = int(torch.count_nonzero(mask))
        pruned[name] = keep_largest_among(score_of(scores, name, mask), mask, kept - ceil_count(fraction, kept))
    return pruned


def below_percentile(fraction: float, count: int) -> int:
    """Return how many of `count` different values lie strictly below a percentile that is interpolated linearly.

    The percentile ``100 * fraction`` is at place ``fraction * (count - 1)`` of the sorted values, from 0, as in NumPy;
    ``ceil(fraction * (count - 1))`` values are below it.

    Example:
        >>> below_percentile(0.1, 11), below_percentile(0.1, 12), below_percentile(0.5, 1)
        (1, 2, 0)
    """
    return max(0, ceil_count(fraction, count - 1))


def prune_percentile(scores: Weights, masks: Masks, fraction: float) -> dict[str, Tensor]:
    """Drop, in each masked tensor, the scores below a percentile of those it keeps (:func:`below_percentile`).

    Of equal scores the higher index is dropped first.

    Args:
        scores: Scores for every tensor of `masks`, same shapes; others are ignored.
        masks: Masks of what is kept now.
        fraction: Percentile as a fraction, in [0, 1].

    Raises:
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> prune_percentile({"w": torch.tensor([4.0, 1.0, 2.0])}, {"w": torch.tensor([True, True, True])}, 0.5)
        {'w': tensor([ True, False,  True])}
    """
    held = {name: int(torch.count_nonzero(mask)) for name, mask in masks.items()}
    return shrink(scores, masks, {name: count - below_percentile(fraction, count) for name, count in held.items()})


def prune_to(scores: Weights, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Keep the ``counts[name]`` largest scores of each tensor that `counts` names.

    Raises:
        InvalidOption: If a count is more than the tensor has.
        IncompatibleMasks: If a name has no score.

    Example:
        >>> prune_to({"w": torch.tensor([4.0, 1.0, 2.0])}, {"w": 2})
        {'w': tensor([ True, False,  True])}
    """
    return {name: keep_largest(score_of(scores, name), count) for name, count in counts.items()}


def shrink(scores: Weights, masks: Masks, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Keep the ``counts[name]`` largest scores among those that each mask keeps; what was dropped stays so.

    A mask without a count stays as it is.

    Args:
        scores: Scores for every tensor of `counts`, same shapes.
        masks: Masks of what is kept now.
        counts: Number of positions of each mask to keep.

    Raises:
        InvalidOption: If a count is more than its mask keeps.
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> shrink({"w": torch.tensor([4.0, 1.0, 9.0])}, {"w": torch.tensor([True, True, False])}, {"w": 1})
        {'w': tensor([ True, False, False])}
    """
    shrunk = {}
    for name, mask in masks.items():
        if name in counts:
            mask = keep_largest_among(score_of(scores, name, mask), mask, counts[name])
        shrunk[name] = mask
    return shrunk


def shrink_globally(scores: Weights, masks: Masks, count: int, least: int = 0) -> dict[str, Tensor]:
    """Keep the `count` largest scores of all masks together, among those that they keep.

    Of equal scores that of the earlier mask stays, and in a mask that of the lower index. Without `least`, a mask may
    end up empty.

    Args:
        scores: Scores for every tensor of `masks`, same shapes, all on one device.
        masks: Masks of what is kept now.
        count: Number of positions to keep of all masks together.
        least: Number of positions of each mask that are kept before all others, its largest scores.

    Raises:
        InvalidOption: If `count` is more than the masks keep, or too few for `least` positions of each.
        IncompatibleMasks: If a mask has no score of its shape.

    Example:
        >>> scores = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([3.0, 2.0])}
        >>> shrink_globally(scores, {name: torch.ones(2, dtype=torch.bool) for name in "ab"}, 2)
        {'a': tensor([ True, False]), 'b': tensor([ True, False])}
    """
    if not masks:
        return {}
    if least:
        first = {n: keep_largest_among(score_of(scores, n, m), m, min(least, _kept(m))) for n, m in masks.items()}
        needed, most = (sum(map(_kept, each.values())) for each in (first, masks))
        if not needed <= count <= most:
            raise InvalidOption(f"`count={count}`: expected {needed} ({least} of each layer) to {most}.")
        others = shrink_globally(scores, {n: mask & ~first[n] for n, mask in masks.items()}, count - needed)
        return {name: mask | others[name] for name, mask in first.items()}
    survivors = {name: select(score_of(scores, name, mask), mask) for name, mask in masks.items()}
    keep = keep_largest(torch.cat(list(survivors.values())), count)
    parts = keep.split([value.numel() for value in survivors.values()])
    return {name: scatter(mask, part) for (name, mask), part in zip(masks.items(), parts, strict=True)}


def _kept(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))


def share_masks(weights: Weights, share: float, rng: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return masks that keep a share of each tensor, drawn weight by weight, or the first rows and columns.

    Args:
        weights: Tensors of two or more dimensions by name.
        share: Probability of each weight, or fraction of the rows and of the columns, in (0, 1].
        rng: Generator on the CPU, so that masks are equal on every machine; None = the first rows and columns.

    Example:
        >>> share_masks({"w": torch.ones(2, 4)}, 0.5)["w"].int()
        tensor([[1, 1, 0, 0],
                [0, 0, 0, 0]], dtype=torch.int32)
    """
    masks = {}
    for name, weight in weights.items():
        if rng is None:
            masks[name] = torch.zeros_like(weight, dtype=torch.bool)
            masks[name][: ceil_count(share, weight.shape[0]), : ceil_count(share, weight.shape[1])] = True
        else:
            masks[name] = (torch.rand(weight.shape, generator=rng) < share).to(weight.device)
    return masks


def random_masks(
    shapes: Shapes, counts: Mapping[str, int], generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw masks that keep ``counts[name]`` positions each, without replacement, in the order of `counts`.

    Args:
        shapes: Shapes by name, or tensors of these shapes, on whose devices the masks are.
        counts: Number of positions to keep.
        generator: CPU generator to draw from.

    Raises:
        InvalidOption: If a count is more than the tensor has.

    Example:
        >>> masks = random_masks({"w": (2, 5)}, {"w": 4}, torch.Generator().manual_seed(0))
        >>> masks["w"].shape, int(masks["w"].sum())
        (torch.Size([2, 5]), 4)
    """
    masks = {}
    for name, count in counts.items():
        given = shapes[name]
        mask = torch.zeros(tuple(given.shape if isinstance(given, Tensor) else given), dtype=torch.bool)
        size = mask.numel()
        if not 0 <= count <= size:
            raise InvalidOption(f"`counts[{name!r}]={count}`: expected 0 to {size}, its positions.")
        mask.view(-1)[torch.randperm(size, generator=generator)[:count]] = True
        masks[name] = mask.to(given.device) if isinstance(given, Tensor) else mask
    return masks


def score_of(scores: Weights, name: str, mask: Tensor | None = None) -> Tensor:
    """Return the score of one tensor.

    Raises:
        IncompatibleMasks: If it is missing, or `mask` has another shape.

    Example:
        >>> score_of({"w": torch.ones(1)}, "w")
        tensor([1.])
    """
    if name not in scores:
        raise IncompatibleMasks(f"`{name}` has a mask but its score is missing.")
    if mask is not None and scores[name].shape != mask.shape:
        shapes = f"{tuple(scores[name].shape)}, expected {tuple(mask.shape)} as its mask"
        raise IncompatibleMasks(f"The score of `{name}` has shape {shapes}.")
    return scores[name]


def scatter(mask: Tensor, values: Tensor) -> Tensor:
    """Return `mask` with its True positions, in order, replaced by `values`.

    Example:
        >>> scatter(torch.tensor([True, False, True]), torch.tensor([False, True]))
        tensor([False, False,  True])
    """
    if values.numel() == mask.numel():
        return values.reshape(mask.shape).clone()
    return torch.zeros_like(mask).masked_scatter_(mask, values)
