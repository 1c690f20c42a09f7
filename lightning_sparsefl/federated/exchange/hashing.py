"""Digests of nested plain values: SHA-256 for files, CRC-32 for the comparison of ranks."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.wire import dense


def fingerprint(content: Any) -> str:
    """Return the SHA-256 of nested plain values and tensors, which does not depend on their encoding in a file.

    Args:
        content: Numbers, strings, None, tensors, and mappings (in any order of keys) and sequences of these.

    Example:
        >>> fingerprint({"a": 1, "b": [2.0]}) == fingerprint({"b": (2.0,), "a": 1})
        True
        >>> fingerprint({"a": 1}) == fingerprint({"a": 1.0})
        False
    """
    digest = hashlib.sha256()
    _feed(digest.update, content)
    return digest.hexdigest()


def checksum(value: Any) -> int:
    """Return the CRC-32 of the names, types, shapes and bytes of nested values, in any order of a mapping's names.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.

    Example:
        >>> import torch
        >>> checksum({"a": 1, "b": torch.ones(2)}) == checksum({"b": torch.ones(2), "a": 1})
        True
        >>> checksum(torch.zeros(2)) == checksum(-torch.zeros(2))
        False
    """
    found: list[Any] = []
    _feed(found.append, value)
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), found, 0)


def _feed(take: Callable[[Any], None], value: Any) -> None:
    """Hand over the bytes to hash: kind, length and bytes of each value, which are unique for each content."""
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        take(b"text %d %b" % (len(text), text))
    elif isinstance(value, float):
        take(b"float " + struct.pack("<d", value))
    elif isinstance(value, Tensor):
        take(f"tensor {value.dtype} {list(value.shape)} ".encode())
        take(dense.flat(value.detach().cpu()).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        take(b"mapping %d " % len(value))
        for key in sorted(value, key=lambda key: (type(key).__name__, key)):
            _feed(take, key)
            _feed(take, value[key])
    elif isinstance(value, list | tuple):
        take(b"sequence %d " % len(value))
        for item in value:
            _feed(take, item)
    else:
        take(f"{type(value).__name__} {value} ".encode())
