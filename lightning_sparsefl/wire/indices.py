"""Where things are, as sorted positions: cheaper than one bit each when fewer than about a quarter are True.

The Elias-Fano code (P. Elias, "Efficient storage and retrieval by content and address of static files",
J. ACM 1974; S. Vigna, "Quasi-succinct indices", WSDM 2013). Of m positions below n, the low
``l = floor(log2(n / m))`` bits of each are written as they are; the gaps between the rest are in unary.
That is ``m * l + m + ((n - 1) >> l)`` bits, about ``2 + log2(n / m)`` a position, half a bit more than the
best possible. It depends on n and m alone: the size is known without looking at the positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.wire import bitmask


def size(positions: int, count: int) -> int:
    """Bytes of `count` positions below `positions`.

    Example:
        >>> size(1000, 10), bitmask.size(1000)
        (12, 125)
    """
    low, high = _lengths(positions, count)
    return bitmask.size(low) + bitmask.size(high)


def encode(mask: Tensor) -> bytes:
    """The True positions of a mask.

    Example:
        >>> len(encode(torch.arange(1000) % 100 == 7))
        12
    """
    at = mask.cpu().reshape(-1).nonzero().reshape(-1)
    bits, (_, length) = _low_bits(mask.numel(), at.numel()), _lengths(mask.numel(), at.numel())
    low = (at[:, None] >> torch.arange(bits)).bitwise_and_(1).bool()
    high = torch.zeros(length, dtype=torch.bool)
    high[(at >> bits) + torch.arange(at.numel())] = True
    return bitmask.encode(low) + bitmask.encode(high)


def decode(data: memoryview, positions: int, count: int) -> Tensor:
    """The mask, in one dimension.

    Args:
        data: ``size(positions, count)`` bytes.
        positions: Length of the mask.
        count: How many of them are True.

    Raises:
        MalformedPayload: If the bytes are no `count` ascending positions below `positions`.

    Example:
        >>> mask = torch.arange(1000) % 100 == 7
        >>> torch.equal(decode(memoryview(encode(mask)), 1000, 10), mask)
        True
    """
    bits, (low_length, high_length) = _low_bits(positions, count), _lengths(positions, count)
    split = bitmask.size(low_length)
    low = bitmask.decode(data[:split], low_length).reshape(count, bits).long() << torch.arange(bits)
    ends = bitmask.decode(data[split:], high_length).nonzero().reshape(-1)
    if ends.numel() != count:
        raise MalformedPayload(f"{ends.numel()} positions, expected {count} of {positions}.")
    at = (ends - torch.arange(count) << bits) + low.sum(1)
    if count and not (int(at[-1]) < positions and bool((at[1:] > at[:-1]).all())):
        raise MalformedPayload(f"Positions that do not ascend, expected {count} below {positions}.")
    mask = torch.zeros(positions, dtype=torch.bool)
    mask[at] = True
    return mask


def _low_bits(positions: int, count: int) -> int:
    return max(0, (positions // count).bit_length() - 1) if count else 0


def _lengths(positions: int, count: int) -> tuple[int, int]:
    """Bits of the two parts."""
    if not count:
        return 0, 0
    bits = _low_bits(positions, count)
    return count * bits, count + (positions - 1 >> bits)
