"""The direction in which a metric is better, by its name."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

_FALLING = {
    "loss",
    "error",
    "err",
    "perplexity",
    "ppl",
    "mse",
    "rmse",
    "mae",
    "nll",
    "bce",
    "kl",
    "wer",
    "cer",
    "fid",
    "ece",
}


def higher_is_better(name: str) -> bool:
    """Return whether a metric of this name should rise; losses, errors and the like should fall.

    Args:
        name: Name of the metric.

    Example:
        >>> higher_is_better("val_acc"), higher_is_better("val_loss"), higher_is_better("test_ppl")
        (True, False, False)
    """
    words = set(re.split(r"[^a-z]+", name.lower()))
    return not words & _FALLING and "loss" not in name.lower()


def worst_tenth(values: Sequence[float], rising: bool) -> float:
    """Average the worst tenth of the values, at least one of them.

    Args:
        values: Values of one metric.
        rising: Whether higher values are better.

    Example:
        >>> worst_tenth([0.1, 0.9, 0.8], rising=True)
        0.1
    """
    ordered = sorted(values, reverse=not rising)
    return statistics.fmean(ordered[: max(1, math.ceil(len(ordered) / 10))])
