"""Sparse weights as a file: safetensors, without the zeros.

A tensor that has enough zeros is two entries: its other values in one dimension, under its own name, and a bit for
each position under the name with ``#mask`` behind. All others are ordinary entries. The metadata say which is which:
``format`` names this layout and its version, ``tensors`` is a JSON object from names, in their order, to the shape of
a tensor without zeros and null for an ordinary one. Nothing in a file is executed, and no name is taken for a path.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.wire import bitmask

_FORMAT = "lightning-sparsefl sparse weights, version 1"
_MASK = "#mask"
_ENTRY = 128
"""About the bytes of one more entry in the header."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


def export_sparse(weights: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write weights as safetensors that leave out zeros: a bit a position, and the values that are not zero.

    A zero is a value all of whose bits are, so that ``-0.0`` and NaN come back as they were. The file appears whole or
    not at all.

    Args:
        weights: A module, whose `state_dict` is written, or named tensors of any shapes.
        path: The file; its folder is made if needed.

    Raises:
        InvalidOption: If something cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_sparse({"w": torch.eye(100)}, f"{folder}/w.safetensors")
        ...     loaded = load_sparse(f"{folder}/w.safetensors")
        >>> torch.equal(loaded["w"], torch.eye(100))
        True
    """
    if isinstance(weights, nn.Module):
        weights = getattr(weights, "_orig_mod", weights).state_dict()  # a compiled module has names of its own
    entries: dict[str, Tensor] = {}
    shapes: dict[str, list[int] | None] = {}
    for name, value in weights.items():
        _require_writable(name, value)
        value = value.detach().cpu().contiguous()
        kept = value.view(_BITS[value.element_size()]) != 0
        if value.dim() and _sparse_size(kept, value.element_size()) < value.nbytes:
            entries[name], entries[name + _MASK], shapes[name] = value[kept], pack(kept), list(value.shape)
        else:
            entries[name], shapes[name] = value.clone(), None  # since two names may share their memory
    _write(entries, {"format": _FORMAT, "tensors": json.dumps(shapes)}, Path(path))


def load_sparse(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors that :func:`export_sparse` wrote, bit for bit and in their order, on the CPU.

    They fit ``module.load_state_dict`` and need no more memory than their shapes say, each of which the file must
    justify by its mask, at one bit a position.

    Raises:
        CheckpointMismatch: If the file is missing, torn, or not of this layout.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointMismatch(f"There is no file at {path}; expected one that `export_sparse` wrote.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = _read(file)
    except _Foreign as reason:
        raise CheckpointMismatch(f"{path} {reason}; expected a file that `export_sparse` wrote.") from None
    except Exception as error:
        raise CheckpointMismatch(
            f"{path} is torn or no safetensors file ({type(error).__name__}); expected one that `export_sparse` wrote."
        ) from error
    return found


class _Foreign(Exception):
    """Why a safetensors file is none of ours, as a clause."""


def _require_writable(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise InvalidOption(
            f"`{name}` is a {type(value).__name__}, expected a tensor: take it out of the `state_dict`."
        )
    if value.dtype not in _DTYPES or value.layout != torch.strided or value.is_meta:
        kind = f"{value.layout} tensor of {value.dtype} on {value.device}"
        raise InvalidOption(f"`{name}` is a {kind}, expected a dense one of floats, integers or bools.")
    if name.endswith(_MASK) or name == "__metadata__":
        raise InvalidOption(f"`{name}` is a name with a meaning of its own in the file; choose another.")


def _sparse_size(kept: Tensor, width: int) -> int:
    return bitmask.size(kept.numel()) + int(torch.count_nonzero(kept)) * width + _ENTRY


def _write(entries: Mapping[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(dict(entries), temporary, metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(file: Any) -> dict[str, Tensor]:
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise _Foreign(f"says its format is {metadata.get('format')!r}, not {_FORMAT!r}")
    shapes = json.loads(metadata.get("tensors", ""))
    entries = {name for name, shape in shapes.items()} | {name + _MASK for name, shape in shapes.items() if shape}
    if entries != set(file.keys()):
        raise _Foreign("does not hold the tensors that its header lists")
    # cloned, since the original is a view of the file, which may change
    return {
        name: file.get_tensor(name).clone() if shape is None else _dense(file, name, shape)
        for name, shape in shapes.items()
    }


def _dense(file: Any, name: str, shape: list[int]) -> Tensor:
    values, packed = file.get_tensor(name), file.get_tensor(name + _MASK)
    positions = math.prod(shape)
    fits = packed.dtype == torch.uint8 and packed.dim() == values.dim() == 1 and min(shape) > 0
    if not fits or len(packed) != bitmask.size(positions):
        raise _Foreign(f"has a mask of `{name}` that does not fit its shape {shape}")
    mask = unpack(packed, tuple(shape))
    if int(torch.count_nonzero(mask)) != len(values):
        raise _Foreign(f"has {len(values)} values of `{name}`, another number than its mask keeps")
    return torch.zeros(shape, dtype=values.dtype).masked_scatter_(mask, values)
