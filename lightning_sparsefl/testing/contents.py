"""What runs leave, in a form that can be compared bit for bit."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.federated.storage.memory_store import read_stored
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.testing.promises import Difference


def stored_records(folder: Path) -> dict[str, dict[int, dict[int, Any]]]:
    """Read the records of clients in a run folder: by store (``server``, ``nodes``), client and version.

    Args:
        folder: Run folder.
    """
    content = load_plain(folder / "checkpoints" / "last.ckpt")["sparsefl"]
    stores = {"server": content["server records"], "nodes": content["node records"]}
    clients, run = folder / "checkpoints" / "clients", content["run"]
    return {name: dict(read_stored(StoredRecords(**stored), clients, name, run)) for name, stored in stores.items()}


def last_contents(folder: Path, near: bool = False) -> dict[str, Any]:
    """Read the last checkpoint of a run folder with the newest records of its clients, in comparable form.

    Args:
        folder: Run folder.
        near: Whether floating-point numbers are equal up to rounding in float64.
    """
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    # another index where records lie elsewhere, and another identifier
    for part in ("server records", "node records", "checksum", "run"):
        del content["sparsefl"][part]
    del content["sparsefl"]["identity"]["training"]["federation.wire"]
    content["records"] = {
        name: {client: versions[max(versions)] for client, versions in sorted(records.items())}
        for name, records in stored_records(folder).items()
    }
    found: dict[str, Any] = comparable(content, near)
    return found


def without_masks(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out the masks that a node keeps to decode messages against, and the versions of records with nothing else.

    Args:
        content: Content of a checkpoint, from :func:`last_contents`, which is changed.
    """
    records = content["records"]
    for record in records["server"].values():
        del record["version"]
    nodes = {client: (record["memory"], record["buffers"]) for client, record in records["nodes"].items()}
    records["nodes"] = {client: kept for client, kept in nodes.items() if any(kept)}
    return content


def rows(path: Path) -> list[dict[str, str]]:
    """Read a table of a run folder without its timings.

    Args:
        path: Path of the CSV file.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


class Near:
    """Floating-point numbers that are equal to others up to rounding in float64.

    Args:
        value: Tensor or number.

    Example:
        >>> Near(0.1 + 0.2) == Near(0.3), Near(torch.ones(2)) == Near(torch.ones(3))
        (True, False)
    """

    def __init__(self, value: Tensor | float) -> None:
        self.value = torch.as_tensor(value).detach().cpu().double()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Near) or self.value.shape != other.value.shape:
            return False
        return torch.allclose(self.value, other.value, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(self.value.item()) if self.value.dim() == 0 else f"a tensor with the sum {self.value.sum().item()}"


_ROUNDING = 1e-9
"""Largest difference of two numbers in float64, and of their ratio from 1, that is attributed to rounding."""


def comparable(value: Any, near: bool = False) -> Any:
    """Return a value with tensors as dtype, shape and bytes, and floats as text, so that ``==`` compares every bit.

    Args:
        value: Value of nested containers.
        near: Whether floating-point numbers, also those in texts, are equal up to rounding in float64.

    Example:
        >>> comparable([torch.tensor([65], dtype=torch.uint8)])
        [('torch.uint8', (1,), b'A')]
        >>> comparable({"loss": "0.3"}, near=True) == comparable({"loss": "0.30000000000000004"}, near=True)
        True
    """
    if near and (number := _floating(value)) is not None:
        return Near(number)
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        return (str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, Mapping):
        return {key: comparable(item, near) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item, near) for item in value]
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    return value


def _floating(value: Any) -> Tensor | float | None:
    """Return a floating-point tensor or number, also of a text; None for other values."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if not isinstance(value, float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return where two comparable values first differ, as a clause; empty if they are equal.

    Args:
        one: First value, from :func:`comparable`.
        other: Second value.
        path: Name of the values.

    Example:
        >>> difference({"a": [1, 2]}, {"a": [1, 3]}, "state")
        '`state.a.1` is 2 in one and 3 in the other'
        >>> difference({"a": 1}, {}, "state")
        '`state.a` is in only one of both'
    """
    if one == other:
        return ""
    for kind in (dict, list):
        if isinstance(one, kind) and isinstance(other, kind):
            return _difference_inside(dict(_items(one)), dict(_items(other)), path)
    if isinstance(one, tuple) or isinstance(other, tuple):
        return f"the tensor `{path}` differs"
    return f"`{path}` is {one} in one and {other} in the other"


def _items(values: Any) -> Any:
    return values.items() if isinstance(values, dict) else enumerate(values)


def _difference_inside(one: dict[Any, Any], other: dict[Any, Any], path: str) -> str:
    for key in [*one, *(key for key in other if key not in one)]:
        name = f"{path}.{key}" if path else str(key)
        if (key in one) != (key in other):
            return f"`{name}` is in only one of both"
        if found := difference(one[key], other[key], name):
            return found
    return ""


def require_equal(one: Any, other: Any, name: str, when: str) -> None:
    """Raise :class:`Difference` unless two comparable values are equal.

    Args:
        one: First value, from :func:`comparable`.
        other: Second value.
        name: Name of the values.
        when: Clause that says how the two came about, such as "between 1 and 2 ranks".

    Raises:
        Difference: Naming the first part that differs.
    """
    if found := difference(one, other, name):
        raise Difference(f"{found}, {when}")
