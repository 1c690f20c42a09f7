"""Digests of nested plain values: SHA-256 for files, CRC-32 for the comparison of ranks."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
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
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes to hash: kind, length and bytes of each value, which are unique for each content.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.
    """
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {list(value.shape)} ".encode()
        yield dense.flat(value.detach().cpu()).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)} ".encode()
        for key in sorted(value, key=lambda key: (type(key).__name__, key)):
            yield from pieces(key)
            yield from pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)} ".encode()
        for item in value:
            yield from pieces(item)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield f"text {len(text)} ".encode() + text
    elif isinstance(value, float):
        yield b"float " + struct.pack("<d", value)
    else:
        yield f"{type(value).__name__} {value} ".encode()


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
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces(value), 0)
