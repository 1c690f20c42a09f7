"""Trees of tensors of several clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparsefl.sparse.units import UnitGroup

_CACHE = 1 << 20
"""Bytes of the largest tree of a block; a core's second cache has one or two MiB."""


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


def in_blocks(*trees: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], ...]]:
    """Yield views of a few clients' parts of trees, which a core's cache can hold.

    What passes several times over the weights of a client takes two to six times as long over those of a whole stack,
    which have to be read from memory each time. On other devices than the CPU all clients are one block.

    Args:
        trees: Trees with the clients in dimension 0; one may be empty.

    Example:
        >>> [list(block["a"].shape) for block, _ in in_blocks({"a": torch.zeros(5, 100_000)}, {})]
        [[2, 100000], [2, 100000], [1, 100000]]
    """
    for rows in block_rows(*trees):
        yield tuple({name: tensor[rows] for name, tensor in tree.items()} for tree in trees)


def block_rows(*trees: Mapping[str, Tensor]) -> list[slice]:
    """Return the places of the clients of each block of :func:`in_blocks`.

    Args:
        trees: Trees with the clients in dimension 0.

    Example:
        >>> block_rows({"a": torch.zeros(7, 50_000)})
        [slice(0, 5, None), slice(5, 7, None)]
    """
    tensors = [tensor for tree in trees for tensor in tree.values()]
    clients = size = len(tensors[0])
    if tensors[0].device.type == "cpu":
        largest = max(sum(tensor[0].nbytes for tensor in tree.values()) for tree in trees)
        size = max(_CACHE // max(largest, 1), 1)
    return [slice(start, min(start + size, clients)) for start in range(0, clients, size)]


def join_blocks(blocks: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return trees of consecutive blocks of clients as one.

    Args:
        blocks: Trees with equal names, with the clients of a block in dimension 0.

    Example:
        >>> join_blocks([{"a": torch.zeros(2)}, {"a": torch.ones(1)}])
        {'a': tensor([0., 0., 1.])}
    """
    trees = list(blocks)
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


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
