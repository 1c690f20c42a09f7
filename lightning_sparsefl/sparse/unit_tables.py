"""Groups of units as a tree of tensors, which the state of a server can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from urllib.parse import unquote

from torch import Tensor

from lightning_sparsefl.sparse.tracing import Role
from lightning_sparsefl.sparse.units import Slot, UnitGroup
from lightning_sparsefl.types import Weights

_ROW = "row"
"""Role of a slot in a module with a row for each unit; an "out" slot of another module belongs to a norm."""


def unit_tables(groups: Sequence[UnitGroup]) -> dict[str, Tensor]:
    """Return the positions of all units, with what else masks are made from in the names.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.

    Returns:
        For each tensor with units of a group, its positions, int64 of shape ``(units, positions of each)``.

    Example:
        >>> import torch
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        >>> list(unit_tables(find_groups(net, torch.zeros(1, 1))))
        ['0|0|row|0|0.weight', '0|0|row|0|0.bias', '0|1|in|0|1.weight']
    """
    return {
        f"{number}|{slot.dim}|{_role(group, slot)}|{_quoted(group.name)}|{_quoted(slot.name)}": slot.positions
        for number, group in enumerate(groups)
        for slot in group.slots
    }


def _quoted(name: str) -> str:
    return name.replace("%", "%25").replace("|", "%7C")


def _role(group: UnitGroup, slot: Slot) -> str:
    return _ROW if slot.role == "out" and slot.name.rpartition(".")[0] in group.layers else slot.role


def groups_of(tables: Weights) -> tuple[UnitGroup, ...]:
    """Return the groups that :func:`unit_tables` packed, without their consumers.

    Args:
        tables: Tables of the groups.

    Example:
        >>> import torch
        >>> from lightning_sparsefl.sparse.units import find_groups, unit_masks
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        >>> groups = groups_of(unit_tables(find_groups(net, torch.zeros(1, 1))))
        >>> unit_masks(groups, {"0": torch.tensor([True, False])}, net.state_dict())["1.weight"]
        tensor([[ True, False]])
    """
    slots: dict[tuple[int, str], list[Slot]] = {}
    layers: dict[str, dict[str, None]] = {}
    for key, positions in tables.items():
        number, dim, role, group, tensor = map(unquote, key.split("|"))
        known = cast(Role, "out" if role == _ROW else role)
        slots.setdefault((int(number), group), []).append(Slot(tensor, int(dim), positions.cpu(), known))
        if role == _ROW:
            layers.setdefault(group, {})[tensor.rpartition(".")[0]] = None
    return tuple(
        UnitGroup(name, len(found[0].positions), tuple(found), tuple(layers.get(name, {})), ())
        for (_, name), found in sorted(slots.items())
    )
