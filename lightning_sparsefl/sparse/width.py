"""Narrow networks inside a wide one: their units, and norms without running statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import ceil_count
from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.types import Weights


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
    return {group.name: torch.arange(group.size) < ceil_count(rate, group.size) for group in groups}


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
                f"`{group.name}` has {group.size} units, expected at least one for each of {blocks} networks."
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
