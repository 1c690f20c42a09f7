"""Encoding of a mask as one bit per position."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.wire import dense


def size(positions: int) -> int:
    """Return the number of bytes that encode a mask.

    Args:
        positions: Number of positions in the mask.

    Example:
        >>> size(9)
        2
    """
    return (positions + 7) // 8


def encode(mask: Tensor) -> bytes:
    """Encode a mask; the first position is the lowest bit of the first byte.

    Example:
        >>> encode(torch.tensor([True, False, True])).hex()
        '05'
    """
    return dense.encode(pack(mask.cpu()))


def decode(data: memoryview, positions: int) -> Tensor:
    r"""Decode a mask.

    Args:
        data: Encoded mask of ``size(positions)`` bytes.
        positions: Number of positions in the mask.

    Returns:
        The mask, bool of shape (positions,).

    Raises:
        MalformedPayload: If a padding bit after the last position is set.

    Example:
        >>> decode(memoryview(b"\x05"), 3)
        tensor([ True, False,  True])
    """
    # The last byte may hold bits after the last position, which `encode` leaves at zero.
    if positions % 8 and data[-1] >> positions % 8:
        raise MalformedPayload(f"A mask of {positions} positions has padding bits that are set; expected zeros.")
    return unpack(dense.decode(data, torch.uint8), (positions,))
