"""Bins for histograms over clients; needs no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence


def bin_edges(values: Sequence[float], rising: bool) -> list[float]:
    """Edges of equal bins.

    Args:
        values: One metric of every client.
        rising: Whether more is better.

    Returns:
        Hundredths from 0 to 1, the same in every round, for what rises and lies there, such as an accuracy; else 30
        bins from the least value to the greatest.

    Example:
        >>> len(bin_edges([0.5, 0.75], rising=True)), len(bin_edges([0.5, 0.75], rising=False))
        (101, 31)
    """
    low, high = min(values), max(values)
    if rising and low >= 0 and high <= 1:
        return [step / 100 for step in range(101)]
    if low == high:
        room = max(abs(low), 1.0) / 100
        low, high = low - room, high + room
    return [low + (high - low) * step / 30 for step in range(30)] + [high]
