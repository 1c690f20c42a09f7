"""Simulated availability of clients: the times at which they can be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_sparsefl.errors import check_types, require

_ROUNDING = 1e-9
"""Share of a period by which a time may be off."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Intervals of the simulated clock in which clients can be drawn; a client that was drawn finishes its work.

    Raises:
        InvalidOption: If the intervals are not in ascending order within the period.

    Example:
        >>> Availability(intervals=[[[0, 8]], [[6, 12], [20, 24]]], period=24).period
        24
    """

    intervals: list[list[list[float]]]
    """One list of intervals ``[start, end]`` in seconds for each client, or fewer, which are spread over the clients in
    blocks. An interval includes its start, not its end; a list has at least one interval."""
    period: float = 86400.0
    """Number of seconds after which the intervals repeat, above 0."""

    def __post_init__(self) -> None:
        check_types(self, "federation.availability.")
        fits = 0 < self.period < math.inf
        require(fits, "federation.availability.period", self.period, "a number of seconds above 0")
        expected = f"lists of intervals [start, end] in ascending order within [0, {self.period}], one or more in each"
        fits = bool(self.intervals) and all(_ascend(each, self.period) for each in self.intervals)
        require(fits, "federation.availability.intervals", self.intervals, expected)

    def next_time(self, intervals: Sequence[Sequence[float]], at: float) -> float:
        """Return the first time, not before another one, at which a client is available.

        Args:
            intervals: Intervals of the client.
            at: Simulated time in seconds since the start of the run.

        Example:
            >>> night = Availability(intervals=[[[0, 6], [22, 24]]], period=24)
            >>> [night.next_time(night.intervals[0], at) for at in (5, 6, 23.5, 24, 31)]
            [5, 22.0, 23.5, 24, 46.0]
        """
        cycle, within = divmod(at, self.period)
        for start, end in intervals:
            if within < end:
                return at if within >= start - _ROUNDING * self.period else float(cycle * self.period + start)
        return float((cycle + 1) * self.period + intervals[0][0])


def _ascend(intervals: object, period: float) -> bool:
    """Return whether intervals are valid: neither empty nor overlapping."""
    if not isinstance(intervals, list | tuple) or not intervals:
        return False
    if not all(isinstance(each, list | tuple) and len(each) == 2 for each in intervals):
        return False
    times = [time for each in intervals for time in each]
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in times):
        return False
    inside = times[0] >= 0 and times[-1] <= period
    return inside and all(a < b for a, b in intervals) and all(a[1] <= b[0] for a, b in pairwise(intervals))
