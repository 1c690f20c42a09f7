"""Conversion of nested values to plain types that load with ``weights_only=True``; masks take one bit per element."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_sparsefl.sparse.masks import pack, unpack

_MASK = "packed_mask"


def encoded(value: Any) -> bytes:
    """Encode a value with ``torch.save``, so that it loads with ``weights_only=True``.

    Args:
        value: Plain types and tensors.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pack_plain(value: Any, *path: Any) -> Any:
    """Convert nested values to plain types on the CPU, and bool tensors to one bit per element.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.
        *path: Name of the value, and the keys that lead to it, for the error message.

    Raises:
        TypeError: If a value or a key has any other type, or a key is that of a packed mask.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            _refuse(f"a tensor with the layout {value.layout}", path)
        if value.dtype == torch.bool:
            return {_MASK: pack(value.cpu()), "shape": list(value.shape)}
        flat = value.detach().cpu().contiguous()  # an expanded tensor would be rejected on loading
        whole = flat.untyped_storage().nbytes()  # of which a view would keep, and save, all bytes
        return flat.clone() if whole > flat.nbytes else flat
    if isinstance(value, Mapping):
        _check_keys(value, path)
        return {pack_plain(key, *path): pack_plain(item, *path, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack_plain(item, *path, index) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a `numpy.float64` is a float as well, but cannot be loaded
    return _refuse(f"a `{type(value).__name__}`", path)


def _check_keys(value: Mapping[Any, Any], path: Sequence[Any]) -> None:
    for key in value:
        if key == _MASK or not (key is None or isinstance(key, bool | int | float | str)):
            _refuse(f"the key {key!r}", path)


def _refuse(what: str, path: Sequence[Any]) -> NoReturn:
    name, *keys = path or ("value",)
    raise TypeError(
        f"`{name}{''.join(f'[{key!r}]' for key in keys)}` holds {what}; expected numbers, strings, None, dense "
        "tensors, and dicts and lists of these, since they are written into the checkpoint."
    )


def unpack_plain(value: Any, device: torch.device) -> Any:
    """Restore values converted by :func:`pack_plain`.

    Args:
        value: Packed values.
        device: Device of the tensors.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        if _MASK in value:
            return unpack(value[_MASK], tuple(value["shape"])).to(device)
        return {key: unpack_plain(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack_plain(item, device) for item in value]
    return value


def packed_mask(value: Mapping[str, Any]) -> Tensor:
    """Return the bits of a mask that :func:`pack_plain` packed, as uint8.

    Args:
        value: Packed mask.
    """
    bits: Tensor = value[_MASK]
    return bits
