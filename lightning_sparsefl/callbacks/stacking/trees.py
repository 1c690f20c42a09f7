"""Trees of tensors of several clients, and functions of one client's trees for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.types import Weights


def stack_trees(trees: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the trees of several clients as one with the clients in dimension 0.

    Args:
        trees: One tree for each client, with equal names and shapes.

    Example:
        >>> stack_trees([{"a": torch.zeros(3)}, {"a": torch.ones(3)}])["a"].shape
        torch.Size([2, 3])
    """
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def row_of(tree: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    """Return views of one client's part of a tree.

    Args:
        tree: Tensors with the clients in dimension 0.
        place: Place of the client.

    Example:
        >>> row_of({"a": torch.eye(2)}, 1)
        {'a': tensor([0., 1.])}
    """
    return {name: tensor[place] for name, tensor in tree.items()}


def for_each(function: Callable[..., Any], *trees: Weights) -> Any:
    """Return what a function of one client's trees returns, for all clients.

    Args:
        function: Function of trees, which returns trees.
        trees: Trees with the clients in dimension 0.

    Example:
        >>> for_each(lambda tree: {"b": tree["a"].sum()}, {"a": torch.ones(2, 3)})
        {'b': tensor([3., 3.])}
    """
    return torch.vmap(function)(*trees)


def groups_on(device: torch.device, groups: Sequence[UnitGroup]) -> tuple[UnitGroup, ...]:
    """Return groups of units whose positions are on a device, so that no step moves them there.

    Args:
        device: Device of the weights.
        groups: Groups of units of a module.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        >>> groups_on(torch.device("meta"), find_groups(net, torch.zeros(1, 1)))[0].slots[0].positions.device
        device(type='meta')
    """
    return tuple(
        replace(group, slots=tuple(replace(slot, positions=slot.positions.to(device)) for slot in group.slots))
        for group in groups
    )


def alike(groups: Sequence[Sequence[UnitGroup]]) -> bool:
    """Return whether several modules have their groups of units in the same places.

    Args:
        groups: Groups of each module.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        >>> alike([find_groups(net, torch.zeros(1, 1))] * 2)
        True
    """
    first, *others = groups
    return all(
        len(first) == len(other) and all(_is_same(*pair) for pair in zip(first, other, strict=True)) for other in others
    )


def _is_same(group: UnitGroup, other: UnitGroup) -> bool:
    slots = list(zip(group.slots, other.slots, strict=False))
    same = (group.name, group.size, len(group.slots)) == (other.name, other.size, len(other.slots))
    return same and all(a.name == b.name and torch.equal(a.positions, b.positions) for a, b in slots)
