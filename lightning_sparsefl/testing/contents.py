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


def last_contents(folder: Path) -> dict[str, Any]:
    """Read the last checkpoint of a run folder with the newest records of its clients, in comparable form.

    Args:
        folder: Run folder.
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
    found: dict[str, Any] = comparable(content)
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


def comparable(value: Any) -> Any:
    """Return a value with tensors as dtype, shape and bytes, and floats as text, so that ``==`` compares every bit.

    Example:
        >>> comparable([torch.tensor([65], dtype=torch.uint8)])
        [('torch.uint8', (1,), b'A')]
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        return (str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    return value


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
