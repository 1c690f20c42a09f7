"""Mean and standard deviation over the runs of a group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation of the known values; NaN is unknown."""

    mean: float = math.nan
    """Mean of the known values; NaN without any."""
    std: float = math.nan
    """Sample standard deviation, with the divisor n - 1; NaN for fewer than two values."""
    count: int = 0
    """Number of known values."""

    @property
    def is_known(self) -> bool:
        """Whether there is at least one value."""
        return self.count > 0


def mean_std(values: Iterable[float]) -> MeanStd:
    """Compute the mean and the sample standard deviation of the values that are known.

    Args:
        values: Values, one per run; NaN is unknown.

    Example:
        >>> mean_std([1.0, 3.0, float("nan")])
        MeanStd(mean=2.0, std=1.4142135623730951, count=2)
    """
    known = [float(value) for value in values if math.isfinite(value)]
    if not known:
        return MeanStd()
    std = statistics.stdev(known) if len(known) > 1 else math.nan
    return MeanStd(statistics.fmean(known), std, len(known))
