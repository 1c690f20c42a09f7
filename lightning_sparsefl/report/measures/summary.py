"""The table of a report: scores, costs, and costs to a target, of each run and of each group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.report.measures.mean_std import MeanStd, mean_std
from lightning_sparsefl.report.measures.values import at_the_end, column, last, reached
from lightning_sparsefl.report.reading.groups import Group
from lightning_sparsefl.report.reading.runs import Run

_SCORES = {
    "global": "global {}",
    "personal": "personal {}",
    "personal_worst10": "worst tenth",
    "personal_after": "after local training",
    "unseen": "unseen clients",
    "selected": "selected round",
    "finetuned": "fine-tuned",
}
"""Headers of scores, by their group and what of its spread is meant."""
_COSTS = {
    "bytes_up": ("bytes up", "B"),
    "bytes_down": ("bytes down", "B"),
    "flops": ("training FLOPs", "FLOP"),
    "seconds": ("simulated time", "s"),
}


_TO_TARGET = {
    "rounds": ("rounds", ""),
    "bytes": ("bytes up and down", "B"),
    "flops": ("training FLOPs", "FLOP"),
    "seconds": ("simulated time", "s"),
}
"""Header and unit of what a target costs."""
AT_LEAST, AT_MOST = "\u2265", "\u2264"


@dataclass(frozen=True)
class Measure:
    """A column of the table."""

    name: str
    """Name in files."""
    header: str
    """Header."""
    part: str = "scores"
    """Part of the table: ``scores``, ``costs``, ``target_global`` or ``target_personal``."""
    unit: str | None = None
    """Unit, for values with SI prefixes; None = a score, "" = a plain number."""
    rising: bool | None = None
    """Whether higher is better; None = it has no best value."""


def measures(metric: str | None, targets: Mapping[str, float]) -> list[Measure]:
    """Return the columns that a table may have.

    Args:
        metric: Name of the metric, such as ``test_acc``; None if no run has been evaluated.
        targets: Target of each model, by ``global`` and ``personal``.
    """
    rising = metric is None or higher_is_better(metric)
    found = [Measure("rounds", "rounds", unit="")]
    if metric is not None:
        found += [Measure(f"{key}_{metric}", words.format(metric), rising=rising) for key, words in _SCORES.items()]
    found += [Measure(key, words, "costs", unit, False) for key, (words, unit) in _COSTS.items()]
    found += [
        Measure("paper_bytes", "bytes, by formula", "costs", "B", False),
        Measure("density", "density", "costs"),
    ]
    for model in targets:
        part = f"target_{model}"
        found += [Measure(f"{part}_{name}", words, part, unit, False) for name, (words, unit) in _TO_TARGET.items()]
    return found


def part_titles(metric: str | None, targets: Mapping[str, float]) -> dict[str, str]:
    """Return the titles of the parts of the table.

    Args:
        metric: Name of the metric; None if no run has been evaluated.
        targets: Target of each model.
    """
    sign = AT_LEAST if metric is None or higher_is_better(metric) else AT_MOST
    return {
        "scores": "Scores at the last evaluation",
        "costs": "Costs of all clients and rounds",
        **{f"target_{model}": f"Costs to {model} {metric} {sign} {target:g}" for model, target in targets.items()},
    }


def values_of(run: Run, metric: str | None, targets: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a run for all measures; an unknown one is NaN.

    Args:
        run: Run.
        metric: Name of the metric; None if no run has been evaluated.
        targets: Target of each model.
    """
    values = {"rounds": float(run.rounds), **dict(_scores(run, metric) if metric is not None else ())}
    values |= {key: at_the_end(run, key) for key in _COSTS}  # type: ignore[arg-type]
    values["paper_bytes"] = last(column(run, "comm/paper_bytes_total"))
    values["density"] = last(column(run, "density/all"))
    for model, target in targets.items():
        spent = reached(run, f"{model}/{metric}", target)
        values |= {f"target_{model}_{name}": getattr(spent, name) for name in _TO_TARGET}
    return values


def _scores(run: Run, metric: str) -> Iterator[tuple[str, float]]:
    """Yield the scores of the last evaluation, which a finished run has in its summary: null if they are not finite."""
    for key in _SCORES:
        group, _, spread = key.partition("_worst")
        name = f"{group}/{metric}" + (f"_worst{spread}" if spread else "")
        if run.is_finished and name in run.summary:
            final = run.summary[name]
            value = float(final) if isinstance(final, int | float) else math.nan
        else:
            value = last(column(run, name))
        yield f"{key}_{metric}", value


@dataclass(frozen=True)
class Summary:
    """The table of a report."""

    measures: Sequence[Measure]
    """Columns of which at least one run has a value."""
    groups: Mapping[str, Mapping[str, MeanStd]]
    """Mean and standard deviation by group and name of the measure."""
    runs: Mapping[str, Sequence[Mapping[str, float]]]
    """Values of each run by group and name of the measure."""
    titles: Mapping[str, str]
    """Titles of the parts, also of those without a measure."""

    def parts(self) -> dict[str, list[Measure]]:
        """Return the measures of each part that has any."""
        found = {part: [measure for measure in self.measures if measure.part == part] for part in self.titles}
        return {part: members for part, members in found.items() if members}

    def best(self, measure: Measure) -> float | None:
        """Return the best mean of a measure, or None if there is nothing to compare.

        Args:
            measure: Column of the table.
        """
        known = [values[measure.name].mean for values in self.groups.values() if values[measure.name].is_known]
        if measure.rising is None or len(known) < 2:
            return None
        return max(known) if measure.rising else min(known)


def summarize(groups: Sequence[Group], metric: str | None, targets: Mapping[str, float]) -> Summary:
    """Compute the table of a report.

    Args:
        groups: Groups of runs.
        metric: Name of the metric; None if no run has been evaluated.
        targets: Target of each model.
    """
    runs = {group.name: [values_of(run, metric, targets) for run in group.runs] for group in groups}
    columns = [
        measure
        for measure in measures(metric, targets)
        if any(not math.isnan(values[measure.name]) for found in runs.values() for values in found)
    ]
    means = {
        group: {measure.name: mean_std(values[measure.name] for values in found) for measure in columns}
        for group, found in runs.items()
    }
    return Summary(columns, means, runs, part_titles(metric, targets))
