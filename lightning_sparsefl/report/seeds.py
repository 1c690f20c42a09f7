"""Rows of a table over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sparsefl.report.measures.mean_std import mean, sample_std
from lightning_sparsefl.report.tables import summary_rows

_NOT_AVERAGED = ("algorithm", "rounds", "stopped_by", "clients", "clients_scored", "seed")


def seed_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Create the rows of a table of several runs: mean and sample standard deviation, then each run.

    The standard deviation of one run is unknown, and blank. What is not known of every run has no row. A score that is
    not finite, as of a run that diverged, makes the standard deviation NaN, and is not left out of the mean.

    Args:
        summaries: Summaries of runs that differ only in their seeds.

    Example:
        >>> seed_rows([{"global/test_acc": 0.5}, {"global/test_acc": 0.7}])
        [('global test_acc', '0.6000', '0.1414', '0.5000', '0.7000')]
    """
    names = [name for name in summaries[0] if all(name in each for each in summaries) and name not in _NOT_AVERAGED]
    values = {name: [float(each[name]) for each in summaries] for name in names}
    means = {name: mean(each) for name, each in values.items()}
    stds = {name: sample_std(each) for name, each in values.items() if len(each) > 1}
    return summary_rows(means, stds, *summaries)
