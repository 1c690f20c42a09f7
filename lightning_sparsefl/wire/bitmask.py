"""Where things are, at one bit a position."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.wire import dense


def size(positions: int) -> int:
    """Bytes of a mask of so many positions.

    Example:
        >>> size(9)
        2
    """
    return (positions + 7) // 8


def encode(mask: Tensor) -> bytes:
    """The bits of a mask, the first in the lowest bit.

    Example:
        >>> encode(torch.tensor([True, False, True])).hex()
        '05'
    """
    return dense.encode(pack(mask.cpu()))


def decode(data: memoryview, positions: int) -> Tensor:
    r"""The mask, in one dimension.

    Args:
        data: ``size(positions)`` bytes.
        positions: Length of the mask.

    Raises:
        MalformedPayload: If a bit past the end is set.

    Example:
        >>> decode(memoryview(b"\x05"), 3)
        tensor([ True, False,  True])
    """
    if positions % 8 and data[-1] >> positions % 8:
        raise MalformedPayload(f"A mask of {positions} positions has bits past its end.")
    return unpack(dense.decode(data, torch.uint8), (positions,))
