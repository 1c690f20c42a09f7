"""Models as the values that their masks keep, and the mean of models with different masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_sparsefl.types import Masks, Weights


def kept_values(weights: Weights, masks: Masks) -> dict[str, Tensor]:
    """Return the values that masks keep, in the order of each tensor; a tensor without a mask as it is.

    Args:
        weights: Weights by name.
        masks: Masks of the same shapes and devices.

    Example:
        >>> kept_values({"w": torch.tensor([1.0, 0.0]), "b": torch.zeros(1)}, {"w": torch.tensor([True, False])})
        {'w': tensor([1.]), 'b': tensor([0.])}
    """
    return {name: weight[masks[name]] if name in masks else weight for name, weight in weights.items()}


def with_zeros(values: Weights, masks: Masks) -> dict[str, Tensor]:
    """Return weights in their shapes, the inverse of :func:`kept_values`.

    Args:
        values: Values that the masks keep, by name.
        masks: Masks, on the same devices.

    Example:
        >>> with_zeros({"w": torch.tensor([3.0])}, {"w": torch.tensor([False, True])})
        {'w': tensor([0., 3.])}
    """
    return {name: _spread(each, masks[name]) if name in masks else each for name, each in values.items()}


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(mask, values)


def held_mean(own: tuple[Weights, Masks], others: Iterable[tuple[Weights, Masks]]) -> dict[str, Tensor]:
    """Return the mean of each weight over the models whose masks keep it; 0 where none does.

    The sums are of differences from the first model, so that floating-point weights that all models share are the same
    to the last bit.

    Args:
        own: Weights, with zeros where the masks are False, and masks of the first model.
        others: Weights and masks of the other models.

    Example:
        >>> masks = {"w": torch.tensor([True, False])}
        >>> held_mean(({"w": torch.tensor([1.0, 0.0])}, masks), [({"w": torch.tensor([3.0, 5.0])}, {})])
        {'w': tensor([2., 5.])}
    """
    weights, masks = own
    first = {name: _wide(weight) for name, weight in weights.items()}
    total = {name: torch.zeros_like(weight) for name, weight in first.items()}
    holders = {name: _held(masks, name, weight) for name, weight in first.items()}
    for theirs, their_masks in others:
        for name, weight in theirs.items():
            held = _held(their_masks, name, first[name])
            total[name] = total[name] + (_wide(weight) - first[name]) * held
            holders[name] = holders[name] + held
    means = {name: weight + total[name] / holders[name].clamp(min=1) for name, weight in first.items()}
    return {name: mean.to(weights[name].dtype) for name, mean in means.items()}


def _wide(weight: Tensor) -> Tensor:
    """Return a weight in a type in which sums and counts of many are exact enough."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _held(masks: Masks, name: str, weight: Tensor) -> Tensor:
    """Return a mask as numbers of a weight's type, 1 for a tensor without one."""
    return masks[name].to(weight.dtype) if name in masks else torch.ones_like(weight)
