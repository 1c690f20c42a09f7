"""File format for sparse weights: safetensors that store only non-zero values.

A tensor with enough zeros is stored as two entries: its non-zero values in one dimension, under its own name, and one
bit per position, under its name followed by ``#mask``. All other tensors are ordinary entries. Two metadata fields
describe the layout: ``format`` is the name and version of this format, and ``tensors`` is a JSON object that maps the
names, in their order, to the shape of a sparse tensor and to null for an ordinary one. An optional third one,
``versions``, is a JSON object that maps the names of modules to their versions. Loading executes nothing from the file
and never uses a tensor name as a path.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.files import replacing
from lightning_sparsefl.sparse.apply import INTEGERS
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.sparse.versions import versions_of, with_versions
from lightning_sparsefl.wire import bitmask

_FORMAT = "lightning-sparsefl sparse weights, version 1"
_MASK = "#mask"
_ENTRY = 128
"""Approximate size of one entry in the header, in bytes."""
_DIMENSIONS = 64
"""Largest number of dimensions of a tensor that torch computes with."""
_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


def export_sparse(weights: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write weights as safetensors that store one bit per position and the non-zero values.

    Only values whose bits are all zero are left out, so ``-0.0`` and NaN are restored exactly. The file is written
    atomically.

    Args:
        weights: Module, whose ``state_dict()`` is written, or a mapping from names to tensors of any shape.
        path: Path of the file; missing parent folders are created.

    Raises:
        InvalidOption: If `weights` is neither a module nor a mapping, or if an entry is not a dense tensor of a
            supported type, or has a reserved name.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_sparse({"w": torch.eye(100)}, f"{folder}/w.safetensors")
        ...     loaded = load_sparse(f"{folder}/w.safetensors")
        >>> torch.equal(loaded["w"], torch.eye(100))
        True
    """
    if isinstance(weights, nn.Module):
        weights = getattr(weights, "_orig_mod", weights).state_dict()  # the names of a compiled module have a prefix
    if not isinstance(weights, Mapping):
        raise InvalidOption(f"`weights` is a {type(weights).__name__}; expected a module, or a mapping of tensors.")
    entries: dict[str, Tensor] = {}
    shapes: dict[str, list[int] | None] = {}
    for name, value in weights.items():
        _require_writable(name, value)
        value = value.detach().cpu().contiguous()
        kept = value.view(INTEGERS[value.element_size()]) != 0
        if value.dim() and _sparse_size(kept, value.element_size()) < value.nbytes:
            entries[name], entries[name + _MASK], shapes[name] = value[kept], pack(kept), list(value.shape)
        else:
            entries[name], shapes[name] = value.clone(), None  # two names may share memory, which safetensors refuses
    versions = versions_of(weights)
    metadata = {"versions": json.dumps(versions)} if versions else {}
    _write(entries, {"format": _FORMAT, "tensors": json.dumps(shapes), **metadata}, Path(path))


def load_sparse(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load the tensors of a file that :func:`export_sparse` wrote.

    The memory that loading allocates is bounded by the size of the file: a sparse tensor of n positions needs a mask
    of n bits.

    Args:
        path: Path of the file.

    Returns:
        The tensors by name, bit for bit and in their original order, on the CPU; an argument for
        ``module.load_state_dict``, with the versions of the modules if a ``state_dict`` was written.

    Raises:
        CheckpointMismatch: If the file is missing, truncated or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointMismatch(f"{path} does not exist or is not a file; expected a file that `export_sparse` wrote.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = _read(file)
    except _OtherFormat as reason:
        raise CheckpointMismatch(f"{path} {reason}; expected a file that `export_sparse` wrote.") from None
    except Exception as error:
        raise CheckpointMismatch(
            f"{path} is truncated or not a safetensors file ({type(error).__name__}); expected a file that "
            "`export_sparse` wrote."
        ) from error
    return found


class _OtherFormat(Exception):
    """Reason why a safetensors file is not of this format; the message continues with it after the path."""


def _require_writable(name: str, value: Any) -> None:
    if name.rpartition(".")[2] == _EXTRA_STATE and not isinstance(value, Tensor):
        raise InvalidOption(
            f"`{name}`, the extra state of a module, is a {type(value).__name__}, which the file cannot hold; pass the "
            "`state_dict` without it, and load the file with `load_state_dict(..., strict=False)`."
        )
    if not isinstance(value, Tensor):
        raise InvalidOption(
            f"`{name}` is a {type(value).__name__}; expected a tensor, so remove it from the `state_dict`."
        )
    if value.dtype not in _DTYPES or value.layout != torch.strided or value.is_meta:
        kind = f"{value.layout} tensor of {value.dtype} on {value.device}"
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
        raise InvalidOption(f"`{name}` is a {kind}; expected a dense tensor of one of the types {known}.")
    if name.endswith(_MASK) or name == "__metadata__":
        raise InvalidOption(f"The name `{name}` is reserved by the file format; expected another name.")


def _sparse_size(kept: Tensor, width: int) -> int:
    """Return the bytes of a sparse entry whose values have `width` bytes each."""
    return bitmask.size(kept.numel()) + int(torch.count_nonzero(kept)) * width + _ENTRY


def _write(entries: Mapping[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write a file; the library names an error of the operating system only in its text."""
    with replacing(path) as file:
        try:
            save_file(dict(entries), file.name, metadata)
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), file.name) from error


def _read(file: Any) -> dict[str, Tensor]:
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise _OtherFormat(f"has the format {metadata.get('format')!r} instead of {_FORMAT!r}")
    shapes = json.loads(metadata.get("tensors", ""))
    entries = {name for name, shape in shapes.items()} | {name + _MASK for name, shape in shapes.items() if shape}
    if entries != set(file.keys()):
        raise _OtherFormat("does not contain exactly the tensors that its header lists")
    versions = json.loads(metadata.get("versions", "{}"))
    if not isinstance(versions, dict) or not all(type(version) is int for version in versions.values()):
        raise _OtherFormat("has versions of modules that are not whole numbers")
    # Clone, since `get_tensor` may return a view of the memory-mapped file, which can change later.
    found = {
        name: file.get_tensor(name).clone() if shape is None else _dense(file, name, shape)
        for name, shape in shapes.items()
    }
    return with_versions(found, versions)


def _dense(file: Any, name: str, shape: list[int]) -> Tensor:
    if len(shape) > _DIMENSIONS:
        raise _OtherFormat(f"has {len(shape)} dimensions of `{name}`, where torch computes with at most {_DIMENSIONS}")
    values, packed = file.get_tensor(name), file.get_tensor(name + _MASK)
    positions = math.prod(shape)
    fits = packed.dtype == torch.uint8 and packed.dim() == values.dim() == 1 and min(shape) > 0
    if not fits or len(packed) != bitmask.size(positions):
        raise _OtherFormat(f"has a mask of `{name}` that does not match its shape {shape}")
    mask = unpack(packed, tuple(shape))
    if int(torch.count_nonzero(mask)) != len(values):
        raise _OtherFormat(f"has {len(values)} values of `{name}`, but its mask keeps another number")
    return torch.zeros(shape, dtype=values.dtype).masked_scatter_(mask, values)
