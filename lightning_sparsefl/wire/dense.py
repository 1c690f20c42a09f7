"""Values as they are: little-endian, in their own type."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
"""What can be sent; the position is the type's number on the wire, so new ones go to the end."""


def size(count: int, dtype: torch.dtype) -> int:
    """Bytes of `count` values.

    Example:
        >>> size(3, torch.float16)
        6
    """
    return count * dtype.itemsize


def encode(values: Tensor) -> bytes:
    """The bytes of a tensor, row by row.

    Example:
        >>> encode(torch.tensor([1, 2], dtype=torch.int16)).hex()
        '01000200'
    """
    flat = values.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def decode(data: memoryview, dtype: torch.dtype) -> Tensor:
    """The values, in one dimension.

    Args:
        data: A whole number of values.
        dtype: Their type.

    Example:
        >>> decode(memoryview(bytes.fromhex("01000200")), torch.int16)
        tensor([1, 2], dtype=torch.int16)
    """
    if not data:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(data), dtype=dtype)
