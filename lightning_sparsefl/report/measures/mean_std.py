"""Mean and standard deviation over the runs of a group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
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
    return MeanStd(mean(known), sample_std(known), len(known)) if known else MeanStd()


def mean(values: Sequence[float]) -> float:
    """Compute a mean, rounded once; of values that are not finite or too large for that, what float64 sums give.

    Args:
        values: One or more values.

    Example:
        >>> mean([0.1] * 10), mean([math.inf, -math.inf]), mean([1e308, 1e308])
        (0.1, nan, 1e+308)
    """
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):
        return sum(value / len(values) for value in values)


def sample_std(values: Sequence[float]) -> float:
    """Compute a sample standard deviation; NaN for fewer than two values, or values that are not finite.

    Args:
        values: Values.

    Example:
        >>> sample_std([1.0, 3.0]), sample_std([1.0]), sample_std([1.7e308, -1.7e308])
        (1.4142135623730951, nan, inf)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    try:
        return statistics.stdev(values)
    except OverflowError:
        return math.inf
