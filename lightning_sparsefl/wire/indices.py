"""Encoding of a mask as sorted positions; smaller than one bit per position below a density of about 1/4.

This is the Elias-Fano code (P. Elias, "Efficient storage and retrieval by content and address of static files",
J. ACM 1974; S. Vigna, "Quasi-succinct indices", WSDM 2013). For m positions below n, the low
``l = floor(log2(n / m))`` bits of each position are stored as they are, and the differences between the high bits in
unary. The code takes ``m * l + m + ((n - 1) >> l)`` bits, which is about ``2 + log2(n / m)`` per position and half a
bit per position above the minimum. The size depends on n and m alone, so it is known without the positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.wire import bitmask


def size(positions: int, count: int) -> int:
    """Return the number of bytes that encode a mask.

    Args:
        positions: Number of positions in the mask.
        count: Number of positions that are True.

    Example:
        >>> size(1000, 10), bitmask.size(1000)
        (12, 125)
    """
    low, high = _lengths(positions, count)
    return bitmask.size(low) + bitmask.size(high)


def encode(mask: Tensor) -> bytes:
    """Encode the positions of a mask that are True.

    Example:
        >>> len(encode(torch.arange(1000) % 100 == 7))
        12
    """
    at = mask.cpu().reshape(-1).nonzero().reshape(-1)
    bits, (_, length) = _low_bits(mask.numel(), at.numel()), _lengths(mask.numel(), at.numel())
    low = (at[:, None] >> torch.arange(bits)).bitwise_and_(1).bool()
    # Unary code of the differences: bit (high bits of the i-th position) + i is set.
    high = torch.zeros(length, dtype=torch.bool)
    high[(at >> bits) + torch.arange(at.numel())] = True
    return bitmask.encode(low) + bitmask.encode(high)


def decode(data: memoryview, positions: int, count: int) -> Tensor:
    """Decode a mask.

    Args:
        data: Encoded mask of ``size(positions, count)`` bytes.
        positions: Number of positions in the mask.
        count: Number of positions that are True.

    Returns:
        The mask, bool of shape (positions,).

    Raises:
        MalformedPayload: If the bytes are not the encoding of `count` ascending positions below `positions`.

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
        raise MalformedPayload(f"A mask holds {ends.numel()} positions; expected {count} of {positions}.")
    # The i-th set bit is at (high bits of the i-th position) + i.
    at = (ends - torch.arange(count) << bits) + low.sum(1)
    if count and not (int(at[-1]) < positions and bool((at[1:] > at[:-1]).all())):
        raise MalformedPayload(
            f"The positions of a mask do not ascend; expected {count} ascending positions below {positions}."
        )
    mask = torch.zeros(positions, dtype=torch.bool)
    mask[at] = True
    return mask


def _low_bits(positions: int, count: int) -> int:
    """Return the number of low bits that are stored for each position."""
    return max(0, (positions // count).bit_length() - 1) if count else 0


def _lengths(positions: int, count: int) -> tuple[int, int]:
    """Return the lengths in bits of the part with the low bits and of the unary part."""
    if not count:
        return 0, 0
    bits = _low_bits(positions, count)
    return count * bits, count + (positions - 1 >> bits)
