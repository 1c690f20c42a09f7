"""Scales of norms as scores of units: a unit that its norm multiplies by almost zero passes almost nothing on.

Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", ICCV 2017, arXiv:1708.06519. A scale
is the weight of a norm that has one, and a bias, for each unit; which tells norms from activations with parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.units import Slot, UnitGroup
from lightning_sparsefl.types import Masks, Weights


def scaled_groups(groups: Sequence[UnitGroup], weights: Weights) -> tuple[UnitGroup, ...]:
    """Return the groups of units that a norm scales, in the order of the forward pass.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights of the model.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> nn = torch.nn
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.PReLU(2), nn.Linear(2, 1))
        >>> [group.name for group in scaled_groups(find_groups(net, torch.zeros(1, 1)), net.state_dict())]
        ['0']
    """
    return tuple(group for group in groups if any(True for _ in _scales(group, weights)))


def _scales(group: UnitGroup, tensors: Mapping[str, Tensor]) -> Iterator[Slot]:
    names = {slot.name for slot in group.slots if slot.role == "out" and slot.name in tensors}
    for slot in group.slots:
        module, _, leaf = slot.name.rpartition(".")
        normed = leaf == "weight" and f"{module}.bias" in names
        if slot.name in names and normed and tensors[slot.name].dim() == 1:
            yield slot


def unit_scales(groups: Sequence[UnitGroup], weights: Weights) -> dict[str, Tensor]:
    """Return the sum of the absolute scales of each unit, over its norms if it has several.

    Args:
        groups: Groups from :func:`scaled_groups`.
        weights: Weights of the model.

    Returns:
        For each group, ``(units,)``, on the CPU.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
        >>> weights = {**net.state_dict(), "1.weight": torch.tensor([0.5, -2.0])}
        >>> unit_scales(find_groups(net, torch.zeros(1, 1)), weights)
        {'0': tensor([0.5000, 2.0000])}
    """
    return {
        group.name: torch.stack(
            [weights[slot.name].detach().cpu().abs()[slot.positions].sum(1) for slot in _scales(group, weights)]
        ).sum(0)
        for group in groups
    }


def scaled_units(groups: Sequence[UnitGroup], masks: Masks) -> dict[str, Tensor]:
    """Return the units of which masks keep a scale.

    Args:
        groups: Groups from :func:`scaled_groups`.
        masks: Masks of all parameters.

    Returns:
        For each group, bool of shape ``(units,)``, on the CPU.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
        >>> masks = {"1.weight": torch.tensor([True, False]), "1.bias": torch.tensor([True, False])}
        >>> scaled_units(find_groups(net, torch.zeros(1, 1)), masks)
        {'0': tensor([ True, False])}
    """
    return {name: count > 0 for name, count in unit_scales(groups, {n: m.float() for n, m in masks.items()}).items()}


def drop_smallest_scales(scales: Weights, kept: Masks, fraction: float, least: Sequence[int]) -> dict[str, Tensor]:
    """Drop the kept units of each group with scales up to a quantile: ``floor(fraction * kept) + 1`` of them.

    A group of which too few would be left stays as it is. Of equal scales the higher index is dropped first.

    Args:
        scales: Scales of the units of each group, ``(units,)``.
        kept: Units of each group that are kept now.
        fraction: Quantile, in [0, 1).
        least: Smallest numbers of units to keep, >= 1, of the groups in their order; the last one holds for all
            further groups.

    Example:
        >>> kept = {"conv": torch.tensor([True, True, True, True])}
        >>> drop_smallest_scales({"conv": torch.tensor([0.3, 0.1, 0.4, 0.2])}, kept, 0.45, [2])
        {'conv': tensor([ True, False,  True, False])}
        >>> drop_smallest_scales({"conv": torch.tensor([0.3, 0.1, 0.4, 0.2])}, kept, 0.45, [3])
        {'conv': tensor([True, True, True, True])}
    """
    left = {name: count - floor_count(fraction, count) - 1 for name, count in counts(kept).items()}
    floors = {name: least[min(place, len(least) - 1)] for place, name in enumerate(kept)}
    return shrink(scales, kept, {name: count for name, count in left.items() if count >= floors[name]})
