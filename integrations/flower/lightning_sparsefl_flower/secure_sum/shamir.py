"""Shares of a secret, of which any `threshold` restore it and fewer tell nothing (Shamir 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from math import prod

PRIME = 2**257 - 93
"""Size of the field, the largest prime below 2**257, so that a secret of 256 bits is an element."""
SHARE_BYTES = 33
"""Bytes of a share."""


def split(secret: int, threshold: int, points: Collection[int]) -> dict[int, int]:
    """Split a secret into shares, the values of a random polynomial whose value at 0 is the secret.

    Args:
        secret: Number from 0 to `PRIME` - 1.
        threshold: Number of shares that restore the secret, >= 1.
        points: Different numbers from 1 to `PRIME` - 1, one for each holder, at which the polynomial is evaluated.

    Raises:
        ValueError: If the secret, the threshold or the points are out of their range.

    Example:
        >>> shares = split(7, 2, [1, 2, 3])
        >>> combine({1: shares[1], 3: shares[3]})
        7
    """
    if not 0 <= secret < PRIME:
        raise ValueError("The secret is out of the field; expected a number from 0 to PRIME - 1.")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"The threshold is {threshold}; expected 1 to {len(points)}, the number of shares.")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("The points of shares are equal or out of range; expected different numbers above 0.")
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point) for point in points}


def _value(coefficients: Iterable[int], point: int) -> int:
    """Return the value of a polynomial by Horner's rule."""
    value = 0
    for coefficient in reversed(list(coefficients)):
        value = (value * point + coefficient) % PRIME
    return value


def combine(shares: Mapping[int, int]) -> int:
    """Return the secret, the value at 0 of the polynomial of lowest degree through the shares.

    Args:
        shares: Shares by point, as many as the threshold or more.
    """
    return sum(factor * shares[point] for point, factor in factors(shares).items()) % PRIME


def factors(points: Collection[int]) -> dict[int, int]:
    """Return Lagrange's coefficients at 0, which are the same for all secrets with the same points.

    Args:
        points: Points of the shares.
    """
    return {
        point: prod(other * pow(other - point, -1, PRIME) % PRIME for other in points if other != point) % PRIME
        for point in points
    }
