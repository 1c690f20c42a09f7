"""A split data set in files that the processes of a machine map into memory, so that they share one copy.

An array is a file that is named by the SHA-256 of its content, so that equal arrays are kept once, and a file that is
damaged is found out. A JSON file names the arrays of a split. Files are replaced as a whole and never changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sparsefl.data.split import SplitData
from lightning_sparsefl.errors import DataNotFound, InvalidOption
from lightning_sparsefl.files import replacing

_BROKEN = (OSError, ValueError, EOFError, AttributeError)
"""Errors of reading a file that is missing, cut or of another kind."""
_SMALL = 4096
"""Files of fewer bytes, which may have no content to map, are read."""


def write_split(held: SplitData, folder: Path, name: str) -> None:
    """Write the arrays of a split that are not in the folder, or not as they should be.

    Args:
        held: Split data set.
        folder: Folder of the files; created if needed.
        name: Name of the split.
    """
    names = {key: _write_array(tensor, folder) for key, tensor in _tensors(held).items()}
    with replacing(folder / f"{name}.json") as file:
        file.write(json.dumps(names, indent=2).encode())


def map_split(folder: Path, name: str) -> SplitData:
    """Map the arrays of a split into memory, without reading them; a change of one stays in this process.

    Args:
        folder: Folder of the files.
        name: Name of the split.

    Raises:
        DataNotFound: If `prepare_data` has not written the split, or a file is damaged.
    """
    path = folder / f"{name}.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        tensors = {key: _map_array(folder, digest) for key, digest in listed.items()}
        return _split(tensors)
    except (*_BROKEN, KeyError, TypeError) as error:
        raise DataNotFound(
            f"`data.memory_map` is {str(folder)!r}, where {path.name} does not name a whole data set ({error}); "
            "expected the files that `prepare_data` writes: call it first, and `super().prepare_data()` in your own."
        ) from error


def _tensors(held: SplitData) -> dict[str, Tensor]:
    """Return the tensors of a split by name; those of a part are numbered."""
    values = {field.name: getattr(held, field.name) for field in fields(held)}
    whole = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    parts = {name: value for name, value in values.items() if isinstance(value, tuple)}
    return whole | {f"{name}.{number}": part[number] for name, part in parts.items() for number in (0, 1)}


def _split(tensors: Mapping[str, Tensor]) -> SplitData:
    return SplitData(
        train=(tensors["train.0"], tensors["train.1"]),
        train_stops=tensors["train_stops"],
        val=(tensors["val.0"], tensors["val.1"]),
        val_stops=tensors.get("val_stops"),
        test=(tensors["test.0"], tensors["test.1"]),
        test_indices=tensors["test_indices"],
        test_stops=tensors["test_stops"],
    )


def _write_array(tensor: Tensor, folder: Path) -> str:
    """Write a tensor unless its file is there and whole, and return the digest that names the file.

    Raises:
        InvalidOption: If NumPy, whose files these are, lacks the type of the tensor.
    """
    if tensor.dtype == torch.bfloat16:
        raise InvalidOption(
            f"`data.memory_map` is {str(folder)!r}, and NumPy has no {tensor.dtype}; expected data of another type, "
            "such as torch.float16, or null."
        )
    array = np.ascontiguousarray(tensor.numpy())
    digest = _digest(array)
    path = folder / f"{digest}.npy"
    if not _is_whole(path, digest):
        with replacing(path) as file:
            np.save(file, array, allow_pickle=False)
    return digest


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return _digest(np.load(path, mmap_mode=_mode(path), allow_pickle=False)) == digest
    except _BROKEN:
        return False


def _map_array(folder: Path, digest: str) -> Tensor:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    path = folder / f"{digest}.npy"
    return torch.from_numpy(np.load(path, mmap_mode=_mode(path), allow_pickle=False))


def _mode(path: Path) -> Literal["c"] | None:
    """Return the mode in which pages are shared until this process changes one."""
    return "c" if path.stat().st_size >= _SMALL else None


def _digest(array: np.ndarray) -> str:
    """Return the SHA-256 of type, shape and content."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
