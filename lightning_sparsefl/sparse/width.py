"""Narrow networks inside a wide one: their units, and norms without running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import ceil_count, floor_count
from lightning_sparsefl.sparse.units import UnitGroup, keep_units, unit_counts, unit_norms
from lightning_sparsefl.types import Masks, Weights

BlindPattern = Literal["ordered", "random", "rolling"]
"""Ranking of units that does not depend on weights: the first ones, drawn ones, or a window that moves."""
Pattern = Literal["ordered", "random", "rolling", "magnitude"]
"""Ranking of units: one of :data:`BlindPattern`, or by the sum of the absolute weights in their rows."""


def largest_rate(rates: Sequence[float], capacity: float) -> float:
    """Return the largest width within a client's capacity.

    Args:
        rates: Widths that a method offers, in (0, 1].
        capacity: Capacity of the client, in (0, 1].

    Raises:
        InvalidOption: If all rates are larger.

    Example:
        >>> largest_rate((1.0, 0.5, 0.25), 0.6)
        0.5
    """
    within = [rate for rate in rates if rate <= capacity]
    if not within:
        raise InvalidOption(
            f"A client has the capacity {capacity}, and the smallest of `algorithm.rates` is {min(rates)}; "
            "add a smaller rate, or raise `federation.capacities`."
        )
    return max(within)


def blind_ranking(groups: Sequence[UnitGroup], pattern: str, seed: int, turn: int) -> dict[str, Tensor]:
    """Return a ranking of units that does not depend on weights; the largest values are kept.

    Args:
        groups: Groups of units of the module.
        pattern: One of :data:`BlindPattern`.
        seed: Seed of the draw.
        turn: Number of earlier draws, or units that the window has moved on; negative = back.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> groups = find_groups(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), torch.zeros(1, 1))
        >>> blind_ranking(groups, "rolling", seed=0, turn=3)
        {'0': tensor([-1., -2., -3.,  0.])}
    """
    if pattern == "random":
        return {g.name: torch.rand(g.size, generator=generator(seed, turn, "units", g.name)) for g in groups}
    first = turn if pattern == "rolling" else 0
    return {group.name: ((first - torch.arange(group.size)) % -group.size).float() for group in groups}


def ranked_units(
    groups: Sequence[UnitGroup],
    rate: float,
    pattern: Pattern,
    *,
    turn: int = 0,
    seed: int = 0,
    weights: Weights | None = None,
    rounding: Literal["up", "nearest", "down"] = "up",
) -> dict[str, Tensor]:
    """Return the units of each group that a pattern ranks first.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        rate: Fraction of each group's units that is kept, in (0, 1]; at least one unit is.
        pattern: Ranking of the units.
        turn: Number of earlier draws of "random", or units that the window of "rolling" has moved on.
        seed: Seed of "random".
        weights: Weights that "magnitude" ranks by.
        rounding: Rounding of the number of kept units: up, to the nearest number, halves up, or down.

    Raises:
        InvalidOption: If `rate` is outside (0, 1].

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> groups = find_groups(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), torch.zeros(1, 1))
        >>> ranked_units(groups, 0.5, "rolling", turn=3)
        {'0': tensor([ True, False, False,  True])}
    """
    counts = unit_counts(groups, rate)  # raises if the rate is out of range
    if rounding != "nearest":
        count = ceil_count if rounding == "up" else floor_count
        counts = {group.name: max(count(rate, group.size), 1) for group in groups}
    if pattern == "magnitude":
        ranking = {name: norms.detach().cpu() for name, norms in unit_norms(groups, weights or {}).items()}
    else:
        ranking = blind_ranking(groups, pattern, seed, turn)
    return keep_units(ranking, counts)


def held_units(groups: Sequence[UnitGroup], masks: Masks) -> dict[str, Tensor] | None:
    """Return the units that masks made by :func:`~lightning_sparsefl.sparse.units.unit_masks` keep.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        masks: Masks of a narrow network over all groups; empty = the whole network.

    Returns:
        For each group, bool of shape ``(units,)``; None for the whole network.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> groups = find_groups(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), torch.zeros(1, 1))
        >>> held_units(groups, {"0.bias": torch.tensor([False, True, True])})
        {'0': tensor([False,  True,  True])}
        >>> held_units(groups, {}) is None
        True
    """
    return used_units(groups, masks) if masks else None


def prefix_units(groups: Sequence[UnitGroup], rate: float) -> dict[str, Tensor]:
    """Return the first units of each group, a fraction `rate`, rounded up (HeteroFL, arXiv:2010.01264, section 3).

    Of two rates the smaller one's units are among the larger one's.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        rate: Width of the narrow network, in (0, 1].

    Raises:
        InvalidOption: If `rate` is outside (0, 1].

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> prefix_units(find_groups(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), torch.zeros(1, 1)), 0.5)
        {'0': tensor([ True,  True, False])}
    """
    if not 0 < rate <= 1:
        raise InvalidOption(f"`rate={rate}`: expected a number in (0, 1].")
    return ranked_units(groups, rate, "ordered")


def used_units(groups: Sequence[UnitGroup], weights: Weights) -> dict[str, Tensor]:
    """Return the units that have a nonzero weight; of each group one at least.

    Cutting the others out changes nothing, as masking them would not.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights of the units; a name that is missing counts as zeros.

    Returns:
        For each group, ``(units,)``.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1))
        >>> weights = {"0.weight": torch.tensor([[0.0], [2.0], [0.0]]), "1.weight": torch.tensor([[0.0, 0.0, 3.0]])}
        >>> used_units(find_groups(net, torch.zeros(1, 1)), weights)
        {'0': tensor([False,  True,  True])}
    """
    return {group.name: _used(group, weights) for group in groups}


def _used(group: UnitGroup, weights: Weights) -> Tensor:
    used = torch.zeros(group.size, dtype=torch.bool)
    for slot in group.slots:
        if slot.role != "buffer" and slot.name in weights:
            lines = (weights[slot.name].detach() != 0).movedim(slot.dim, 0).unsqueeze(-1).flatten(1).any(1)
            used |= lines.cpu()[slot.positions].any(1)
    used[0] |= not bool(used.any())
    return used


def live_units(groups: Sequence[UnitGroup], weights: Weights, threshold: float) -> dict[str, Tensor]:
    """Return the units of which some weight is as large as a threshold; of each group one at least, the largest.

    Counted are outgoing rows and incoming slices. Biases and norms are not: what they let through is multiplied by the
    incoming slices of the next layers (PruneTrain, arXiv:1901.09290, section 4).

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights of the units.
        threshold: Smallest magnitude that keeps a unit alive.

    Returns:
        For each group, ``(units,)``.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        >>> weights = {"0.weight": torch.tensor([[1e-5], [2.0], [0.0]]), "1.weight": torch.tensor([[1e-5, 0.0, 3.0]])}
        >>> live_units(find_groups(net, torch.zeros(1, 1)), weights, 1e-4)
        {'0': tensor([False,  True,  True])}
    """
    return {group.name: _live(group, weights, threshold) for group in groups}


def _live(group: UnitGroup, weights: Weights, threshold: float) -> Tensor:
    largest = torch.zeros(group.size)
    for slot in group.slots:
        if slot.role != "buffer" and slot.name in weights and weights[slot.name].dim() > 1:
            lines = weights[slot.name].detach().abs().movedim(slot.dim, 0).flatten(1).amax(1)
            largest = torch.maximum(largest, lines.cpu()[slot.positions].amax(1))
    live = largest >= threshold
    live[largest.argmax()] = True
    return live


def block_units(groups: Sequence[UnitGroup], block: int, blocks: int) -> dict[str, Tensor]:
    """Return the units of one of several disjoint networks: the groups are cut into consecutive blocks.

    Blocks of a group differ by one unit at most.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        block: Number of the network, from 0.
        blocks: Number of networks.

    Raises:
        InvalidOption: If a group has fewer units than there are blocks.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> block_units(find_groups(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), torch.zeros(1, 1)), 0, 2)
        {'0': tensor([ True,  True, False])}
    """
    for group in groups:
        if group.size < blocks:
            raise InvalidOption(
                f"`{group.name}` has {group.size} units; expected at least one for each of {blocks} networks: take "
                "fewer networks, or a wider model."
            )
    return {group.name: torch.arange(group.size) * blocks // group.size == block for group in groups}


def make_norms_static(module: nn.Module) -> None:
    """Make all batch norms use the statistics of the current batch, also in evaluation, and keep none.

    Running statistics would mix networks of different widths. Parameters keep their names; buffers are gone.

    Args:
        module: Module, which is changed in place.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2))
        >>> make_norms_static(net)
        >>> list(net.state_dict())
        ['0.weight', '0.bias']
    """
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
