"""Statistics of a metric over clients, which are logged beside its mean."""

from __future__ import annotations

from collections.abc import Collection

STATISTICS = {"_std": "std over clients", "_worst10": "worst tenth", "_gap": "participants minus unseen"}
"""Words for each statistic, by what its key has after that of the mean."""


def is_statistic(key: str, keys: Collection[str], suffixes: Collection[str] = tuple(STATISTICS)) -> bool:
    """Return whether a logged key is that of a statistic, and not of a metric of this name.

    A statistic stands beside the mean of its metric; scores of the global model have none.

    Args:
        key: Logged key.
        keys: All logged keys of the run.
        suffixes: Ends of the keys of the statistics that are meant.

    Example:
        >>> is_statistic("personal/acc_std", ["personal/acc"]), is_statistic("personal/acc_std", ["personal/loss"])
        (True, False)
        >>> is_statistic("global/acc_std", ["global/acc"])
        False
    """
    group = key.split("/")[0]
    own = [suffix for suffix in suffixes if key.endswith(suffix) and (suffix != "_gap" or group.endswith("unseen"))]
    return group != "global" and any(key.removesuffix(suffix) in keys for suffix in own)
