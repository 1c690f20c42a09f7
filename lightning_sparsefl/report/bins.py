"""Bins of histograms over clients, in a module that does not import matplotlib."""

from __future__ import annotations

from collections.abc import Sequence


def bin_edges(values: Sequence[float], rising: bool) -> list[float]:
    """Compute the edges of bins of equal width.

    Args:
        values: Values of one metric, one per client.
        rising: Whether higher is better.

    Returns:
        Edges of the bins: 100 bins from 0 to 1, equal in every round, for a metric in [0, 1] of which higher is better,
        such as an accuracy; 30 bins from the lowest to the highest value for any other metric.

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
