"""Scores and costs of one run, as read from its tables. An unknown value is NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report.measures.client_statistics import is_statistic
from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.report.reading.columns import Column
from lightning_sparsefl.report.reading.runs import Run

Axis = Literal["rounds", "bytes_up", "bytes_down", "flops", "seconds"]
Budgeted = Literal["bytes", "flops"]
"""Costs that can have a budget: bytes in both directions, and FLOPs of local training."""
MODELS = ("global", "personal")
"""Groups of scores that are drawn: those of the global model, and of the clients' own models."""
_TOTALS: dict[Axis, str] = {
    "bytes_up": "comm/uplink_bytes_total",
    "bytes_down": "comm/downlink_bytes_total",
    "flops": "flops/train_total",
}
_SLACK = 1e-6
"""Relative error of a score, which covers the rounding of float32."""


def column(run: Run, name: str) -> Column:
    """Return a column of `metrics.csv`, NaN throughout if it is missing.

    Args:
        run: Run.
        name: Name of the column.
    """
    rows = len(run.metrics.get("round", ()))
    return run.metrics.get(name, np.full(rows, math.nan))


def axis(run: Run, name: Axis) -> Column:
    """Return what had been spent after each round, float64 of shape (rounds,).

    Args:
        run: Run.
        name: Name of the cost: finished rounds; bytes that all clients sent, or received; FLOPs; simulated seconds.
    """
    if name == "rounds":
        return column(run, "round") + 1
    if name == "seconds":
        clock = column(run, "time/clock")  # runs that wait for clients have a clock, the others the slowest client
        if np.isfinite(clock).any():
            return clock
        before = math.nan if run.missing_rounds else 0.0
        simulated: Column = before + np.cumsum(column(run, "time/simulated"))  # unknown from the first unknown round on
        return simulated
    return column(run, _TOTALS[name])


def last(values: Column) -> float:
    """Return the last known value, or NaN.

    Args:
        values: Values in the order of the rounds.

    Example:
        >>> last(np.array([1.0, 2.0, math.nan]))
        2.0
    """
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def at_the_end(run: Run, name: Axis) -> float:
    """Return what the run has spent so far, or NaN if the last entry is unknown.

    Args:
        run: Run.
        name: Name of the cost.
    """
    values = axis(run, name)
    return float(values[-1]) if len(values) else math.nan


def good_rows(run: Run, key: str, target: float) -> NDArray[np.bool_]:
    """Return in which recorded rounds a score is as good as a target.

    Args:
        run: Run.
        key: Name of the score, such as ``global/test_acc``.
        target: Value to reach, from below or above as the metric's name says.
    """
    values = eased(column(run, key), key)
    good: NDArray[np.bool_] = values >= target if higher_is_better(key) else values <= target
    return good


def eased(values: Column, key: str) -> Column:
    """Return scores that are better by a millionth, for comparisons with a target.

    A score in float32 may be below the decimal number that it is shown as, such as 0.18999999 of 0.19.

    Args:
        values: Values of the score.
        key: Name of the score.

    Example:
        >>> bool(eased(np.array([0.18999999]), "global/test_acc")[0] >= 0.19)
        True
    """
    slack = _SLACK * np.abs(values)
    return values + slack if higher_is_better(key) else values - slack


@dataclass(frozen=True)
class Reached:
    """What a run had spent when a score first reached a target; NaN if it has not, or if the cost is unknown."""

    rounds: float = math.nan
    """Number of finished rounds."""
    bytes: float = math.nan
    """Bytes in both directions."""
    flops: float = math.nan
    """FLOPs of local training."""
    seconds: float = math.nan
    """Simulated seconds."""


def reached(run: Run, key: str, target: float) -> Reached:
    """Return the costs of the first evaluated round whose score is as good as a target.

    They are unknown if rounds are missing, since one of these may have reached the target before.

    Args:
        run: Run.
        key: Name of the score, such as ``global/test_acc``.
        target: Value to reach, from below or above as the metric's name says.
    """
    good = good_rows(run, key, target)
    if run.missing_rounds or not good.any():
        return Reached()
    first = int(np.argmax(good))
    spent = {name: float(axis(run, name)[first]) for name in (*_TOTALS, "rounds", "seconds")}
    return Reached(spent["rounds"], spent["bytes_up"] + spent["bytes_down"], spent["flops"], spent["seconds"])


def within(run: Run, key: str, cost: Budgeted, budget: float) -> float:
    """Return the score of the last evaluated round up to which a run had spent at most a budget; NaN if unknown.

    Args:
        run: Run.
        key: Name of the score, such as ``global/test_acc``.
        cost: Name of the cost.
        budget: Largest cost, which is itself within the budget.
    """
    scores, costs = _evaluated(run, key, cost)
    scores = scores[costs <= budget]
    return float(scores[-1]) if len(scores) and np.isfinite(costs).all() else math.nan


def exceeds(run: Run, key: str, cost: Budgeted, budget: float) -> bool:
    """Return whether a run had spent more than a budget at its first evaluated round, and so at all of them.

    This is unknown, and not so, if rounds are missing, since one of these may have been evaluated before.

    Args:
        run: Run.
        key: Name of the score, such as ``global/test_acc``.
        cost: Name of the cost.
        budget: Largest cost.
    """
    _, costs = _evaluated(run, key, cost)
    return not run.missing_rounds and len(costs) > 0 and bool(costs[0] > budget)


def _evaluated(run: Run, key: str, cost: Budgeted) -> tuple[Column, Column]:
    """Return a score, NaN if it is not finite, and what had been spent, of the evaluated rounds."""
    scores = column(run, key)
    chosen = np.isfinite(scores) | np.isfinite(column(run, "comm/scoring_bytes"))
    costs = axis(run, "flops") if cost == "flops" else axis(run, "bytes_up") + axis(run, "bytes_down")
    return scores[chosen], costs[chosen]


def choose_metric(runs: Sequence[Run], asked: str | None = None) -> str | None:
    """Return the metric that a report is about, without the group of the score.

    Args:
        runs: Runs.
        asked: Name of the metric, such as ``test_acc``; None = the first one of which higher is better, of those that
            all evaluated runs have.

    Returns:
        Name of the metric; None if no run has been evaluated yet.

    Raises:
        InvalidOption: If a run that has been evaluated lacks the metric, or runs have no metric in common.
    """
    known = {run.path: _metrics(run) for run in runs}
    names = list(dict.fromkeys(name for found in known.values() for name in found))
    if not names:
        if asked is None:
            return None
        raise InvalidOption(f"`metric` is '{asked}', but no run has been evaluated yet; wait for its first evaluation.")
    common = [name for name in names if all(name in found for found in known.values() if found)]
    if asked is None and not common:
        listed = "; ".join(f"{path}: {', '.join(found)}" for path, found in _first_of_each(known).items())
        raise InvalidOption(f"The runs have no metric in common ({listed}); expected runs that were scored alike.")
    chosen = asked or next((name for name in common if higher_is_better(name)), common[0])
    for path, found in known.items():
        if found and chosen not in found:
            raise InvalidOption(
                f"`metric` is '{chosen}', which {path} does not have; expected one of {', '.join(found)}."
            )
    return chosen


def _first_of_each(known: Mapping[Path, list[str]]) -> dict[Path, list[str]]:
    """Return the first run with each list of metrics."""
    first: dict[tuple[str, ...], Path] = {}
    for path, found in known.items():
        first.setdefault(tuple(found), path)
    return {path: list(found) for found, path in first.items() if found}


def _metrics(run: Run) -> list[str]:
    """Return the metrics of the models of a run, which has no columns for them before its first evaluation."""
    keys = [key for key in run.metrics if key.startswith(tuple(f"{model}/" for model in MODELS))]
    return list(dict.fromkeys(key.split("/", 1)[1] for key in keys if not is_statistic(key, run.metrics)))
