"""Encoding of all values of a tensor, little-endian, in the tensor's own type."""

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
"""Types that can be encoded. A type is encoded as its index here, so new types are appended."""


def size(count: int, dtype: torch.dtype) -> int:
    """Return the number of bytes that encode `count` values.

    Args:
        count: Number of values.
        dtype: Type of the values.

    Example:
        >>> size(3, torch.float16)
        6
    """
    return count * dtype.itemsize


def flat(values: Tensor) -> Tensor:
    """Return all values in row-major order and next to each other, also for a view in another type.

    Example:
        >>> flat(torch.tensor([[1, 2]], dtype=torch.int16)).view(torch.uint8)
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    row = values.reshape(-1).contiguous()
    return row.as_strided(row.shape, (1,))  # one value is contiguous with any stride, which a view minds


def encode(values: Tensor) -> bytes:
    """Encode a tensor in row-major order.

    Example:
        >>> encode(torch.tensor([1, 2], dtype=torch.int16)).hex()
        '01000200'
    """
    return flat(values.detach().cpu()).view(torch.uint8).numpy().tobytes()


def decode(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Decode values.

    Args:
        data: Encoded values; the length is a multiple of the size of one value.
        dtype: Type of the values.

    Returns:
        The values in one dimension, on the CPU.

    Example:
        >>> decode(memoryview(bytes.fromhex("01000200")), torch.int16)
        tensor([1, 2], dtype=torch.int16)
    """
    if not data:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(data), dtype=dtype)  # the copy in `bytearray` makes the tensor writable
