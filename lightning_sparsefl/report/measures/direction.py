"""The direction in which a metric is better, by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from lightning_sparsefl.report.measures.client_statistics import is_statistic
from lightning_sparsefl.report.measures.mean_std import mean

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
    "mape",
    "smape",
    "wmape",
    "msle",
    "rmsle",
    "brier",
    "distance",
    "divergence",
    "deviance",
    "cost",
    "entropy",
    "ce",
    "xent",
    "nrmse",
    "nmse",
    "bpc",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name, also of a class such as `MeanSquaredError`."""


def higher_is_better(name: str) -> bool:
    """Return whether a metric of this name should rise; losses, errors and the like should fall.

    A metric falls if a word of its name is one of them, or its name contains ``loss``.

    Args:
        name: Name of the metric.

    Example:
        >>> higher_is_better("val_acc"), higher_is_better("val_loss"), higher_is_better("val_MeanSquaredError")
        (True, False, False)
    """
    words = {word.lower() for word in _WORD.findall(name)}
    return not words & _FALLING and "loss" not in name.lower()


def key_should_rise(key: str, keys: Collection[str]) -> bool:
    """Return whether a logged key should rise: its metric, but neither a spread over clients nor a gap to the unseen.

    A gap is positive where participants have higher values than unseen clients.

    Args:
        key: Logged key.
        keys: All logged keys of the run.

    Example:
        >>> keys = ["personal/acc", "personal/acc_std", "personal/acc_worst10"]
        >>> [key_should_rise(key, keys) for key in keys]
        [True, False, True]
    """
    if is_statistic(key, keys, ("_std",)):
        return False
    return higher_is_better(key) != is_statistic(key, keys, ("_gap",))


def worst_tenth(values: Sequence[float], rising: bool) -> float:
    """Average the worst tenth of the values, at least one of them; NaN if a value is NaN, as a mean is.

    Args:
        values: Values of one metric.
        rising: Whether higher values are better.

    Example:
        >>> worst_tenth([0.1, 0.9, 0.8], rising=True)
        0.1
    """
    if any(map(math.isnan, values)):
        return math.nan
    ordered = sorted(values, reverse=not rising)
    return mean(ordered[: max(1, math.ceil(len(ordered) / 10))])
