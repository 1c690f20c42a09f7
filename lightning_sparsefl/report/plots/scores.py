"""Data of the figures of scores: against rounds and costs, and the costs of a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.report.measures.mean_std import MeanStd, mean_std
from lightning_sparsefl.report.measures.summary import AT_LEAST, AT_MOST
from lightning_sparsefl.report.measures.values import MODELS, Axis, axis, column, eased, reached
from lightning_sparsefl.report.plots.data import Bars, Curves, Line
from lightning_sparsefl.report.reading.groups import Group

_AXES: dict[Axis, tuple[str, str | None, str, str]] = {
    "rounds": ("communication round", None, "rounds", ""),
    "bytes_up": ("sent by clients", "B", "bytes up", ""),
    "bytes_down": ("received by clients", "B", "bytes down", ""),
    "flops": (
        "training FLOPs",
        "FLOP",
        "training FLOPs",
        "the FLOPs of the module could not be counted (see the warning at the start of the run)",
    ),
    "seconds": (
        "simulated time",
        "s",
        "simulated time",
        "time was not simulated (set `federation.devices`)",
    ),
}
"""Label and unit of each axis, its words in a title, and why it may be unknown."""
NOT_EVALUATED = "no round has been evaluated yet"
_NOT_FINITE = "no score is a finite number"


def score_plots(groups: Sequence[Group], metric: str | None) -> Iterator[Curves]:
    """Yield the scores of the global and the personal models against rounds and each cost.

    Args:
        groups: Groups of runs.
        metric: Name of the metric, such as ``test_acc``; None if no run has been evaluated.
    """
    found = {name: {} if metric is None else _panels(groups, metric, name) for name in _AXES}
    for name, (label, unit, words, reason) in _AXES.items():
        panels = found[name]
        yield Curves(
            name=f"score_{name}",
            title=f"{metric or 'Score'} against {words}",
            caption=(
                f"{metric or 'Score'} of the global model and of the clients' own models (mean over clients) after "
                f"each evaluated round, against {_described(name)}. Line: mean over the runs of a group that reached "
                "the round; band: one sample standard deviation."
            ),
            missing=None if panels else NOT_EVALUATED if metric is None else reason if found["rounds"] else _NOT_FINITE,
            x_label=label,
            x_unit=unit,
            panels=panels,
        )


def _described(name: Axis) -> str:
    return {
        "rounds": "the number of finished rounds",
        "bytes_up": "the encoded bytes that all clients together had sent",
        "bytes_down": "the encoded bytes that all clients together had received",
        "flops": "the FLOPs that all clients together had executed in training",
        "seconds": "the simulated time, in which a round takes as long as its slowest client",
    }[name]


def _panels(groups: Sequence[Group], metric: str, name: Axis) -> dict[str, list[Line]]:
    panels = {}
    for model in MODELS:
        lines = [line for group in groups if (line := curve(group, f"{model}/{metric}", name)).x]
        if lines:
            panels[f"{model} {metric}"] = lines
    return panels


def curve(group: Group, key: str, name: Axis) -> Line:
    """Return the score of a group against a cost, with the mean over the runs that have a value in a round.

    Rounds are left out in which the mean cost is below that of an earlier one, since runs with higher costs have ended.

    Args:
        group: Group of runs.
        key: Name of the score, such as ``global/test_acc``.
        name: Cost of the horizontal axis.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        rounds, xs, ys = column(run, "round"), axis(run, name), column(run, key)
        for place in np.flatnonzero(np.isfinite(xs) & np.isfinite(ys)):
            points.setdefault(int(rounds[place]), []).append((float(xs[place]), float(ys[place])))
    found = [points[round] for round in sorted(points)]
    line = [(mean_std(x for x, _ in part), mean_std(y for _, y in part)) for part in found]
    farthest = [-math.inf, *accumulate((x.mean for x, _ in line), max)]
    kept = [point for point, before in zip(line, farthest, strict=False) if point[0].mean > before]
    return Line(group.name, [x for x, _ in kept], [y for _, y in kept])


def default_target(groups: Sequence[Group], key: str) -> float:
    """Return a target that every evaluated run has reached: the weakest of their best values, to two decimals.

    Args:
        groups: Groups of runs.
        key: Name of the score.

    Returns:
        The target, or NaN if no run has the score.
    """
    rising = higher_is_better(key)
    columns = [eased(column(run, key), key) for group in groups for run in group.runs]
    best = [np.nanmax(c) if rising else np.nanmin(c) for c in columns if np.isfinite(c).any()]
    if not best:
        return math.nan
    weakest = min(best) if rising else max(best)
    return float(math.floor(weakest * 100) / 100 if rising else math.ceil(weakest * 100) / 100)


def target_plot(groups: Sequence[Group], metric: str | None, targets: Mapping[str, float]) -> Bars:
    """Return the bytes and the FLOPs that groups needed to reach a target.

    Args:
        groups: Groups of runs.
        metric: Name of the metric; None if no run has been evaluated.
        targets: Target of each model, by ``global`` and ``personal``.
    """
    units = {"bytes": "B", "FLOPs": "FLOP"}
    fields = dict(zip(units, ("bytes", "flops"), strict=True))
    sign = AT_LEAST if metric is None or higher_is_better(metric) else AT_MOST
    series = {
        panel: {
            f"{model} {metric} {sign} {target:g}": _needed(groups, f"{model}/{metric}", target, fields[panel])
            for model, target in targets.items()
        }
        for panel in units
        if metric is not None
    }
    known = {
        panel: found
        for panel, found in series.items()
        if any(value.is_known for values in found.values() for value in values.values())
    }
    return Bars(
        name="target",
        title="Costs to reach a target",
        caption=(
            "Bytes in both directions and training FLOPs of all clients up to the first evaluated round that reached "
            "the target; mean and sample standard deviation over the runs that did. A number such as 2/3 counts them "
            "where some did not; 0/3 stands without a bar, and nothing where there is no such score."
        ),
        missing=None
        if known
        else NOT_EVALUATED
        if metric is None
        else "no run with all of its rounds has reached the target (see `--target`)",
        units={panel: units[panel] for panel in known},
        series=known,
        sizes={group.name: len(group.runs) for group in groups},
    )


def _needed(groups: Sequence[Group], key: str, target: float, name: str) -> dict[str, MeanStd]:
    """Return what groups needed; those whose methods have no such score, as without a global model, are left out."""
    scored = [group for group in groups if any(np.isfinite(column(run, key)).any() for run in group.runs)]
    return {group.name: mean_std(getattr(reached(run, key, target), name) for run in group.runs) for group in scored}
