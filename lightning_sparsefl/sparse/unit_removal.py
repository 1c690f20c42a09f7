"""Removal of units from a module: after unit pruning, a module that is really smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.width import live_units, used_units
from lightning_sparsefl.types import Masks


def shrink(
    module: nn.Module,
    *example_inputs: Any,
    keep: Masks | None = None,
    threshold: float = 0.0,
    ignore: Sequence[str] = (),
) -> nn.Module:
    """Return a smaller copy of a module, without the units whose weights are all zero.

    It computes what the module computes: a unit without a nonzero weight in its row, its bias, its norm and the
    incoming slices of the next layers changes nothing. Parameters keep their names. At least one unit of each group
    stays, and a module of whose units each has a nonzero weight is copied as it is. Weights that were pruned one by one
    remain as zeros.

    Args:
        module: Module after unit pruning, which is not changed.
        example_inputs: Arguments of ``forward``; one sample suffices.
        keep: Units of each group that stay, bool, ``(units,)``, by the names of
            :func:`~lightning_sparsefl.sparse.units.find_groups`; a group that is missing stays whole. Others are
            removed whatever their weights are. Default: those with a nonzero weight.
        threshold: Smallest magnitude in the row or in an incoming slice that keeps a unit, for penalties that make
            weights small and not zero; above 0, the output may change.
        ignore: Modules, or parents of modules, whose outputs stay whole.

    Raises:
        InvalidOption: If no unit of the module can be removed whatever its weights are, a layer with units to remove
            has no smaller form, or an option is not valid.
        IncompatibleMasks: If `keep` does not fit the units.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with torch.no_grad():
        ...     for values in (net[0].weight[1:], net[0].bias[1:], net[2].weight[:, 1:]):
        ...         _ = values.zero_()
        >>> shrink(net, torch.zeros(1, 2))
        Sequential(
          (0): Linear(in_features=2, out_features=1, bias=True)
          (1): ReLU()
          (2): Linear(in_features=1, out_features=1, bias=True)
        )
    """
    if not threshold >= 0:
        raise InvalidOption(f"`threshold={threshold}`: expected a number >= 0.")
    if keep is not None and threshold:
        raise InvalidOption(f"`keep` and `threshold={threshold}` both say which units stay; give one of them.")
    groups = find_groups(module, *example_inputs, ignore=ignore)
    if not groups:
        raise InvalidOption(
            f"`{type(module).__name__}` has no units that can be removed; expected a hidden layer made of known "
            "operations, and not in `ignore`."
        )
    if keep is None:
        weights = module.state_dict()
        keep = live_units(groups, weights, threshold) if threshold else used_units(groups, weights)
    return cut(module, groups, keep)
