"""The table of a report: scores, costs, and costs to a target, of each run and of each group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.report.measures.mean_std import MeanStd, mean_std
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.measures.values import (
    Budgeted,
    at_the_end,
    column,
    exceeds,
    last,
    reached,
    within,
)
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


class Budget(NamedTuple):
    """What is known of the budget of a cost."""

    option: str
    """Name of the option."""
    unit: str
    """Unit of the cost."""
    counted: str
    """What is counted."""
    expected: str
    """Valid values of the option."""


BUDGETS: dict[Budgeted, Budget] = {
    "bytes": Budget("budget", "B", "up and down", "a number of bytes above 0, such as 170000, 170kB or 1.5MB"),
    "flops": Budget("flops_budget", "FLOP", "of training", "a number of FLOPs above 0, such as 2e9, 2G or 1.5TFLOP"),
}
"""What is known of the budget of each cost that can have one."""
AT_LEAST, AT_MOST = "\u2265", "\u2264"


@dataclass(frozen=True)
class Question:
    """What a table is about."""

    metric: str | None
    """Name of the metric, such as ``test_acc``; None if no run has been evaluated."""
    targets: Mapping[str, float]
    """Target of each model that has scores, by ``global`` and ``personal``."""
    budgets: Mapping[Budgeted, float] = field(default_factory=dict)
    """Budget of each cost that has one."""


@dataclass(frozen=True)
class Measure:
    """A column of the table."""

    name: str
    """Name in files."""
    header: str
    """Header."""
    part: str = "scores"
    """Part of the table: ``scores``, ``costs``, or ``target_`` or ``budget_`` with ``global`` or ``personal``."""
    unit: str | None = None
    """Unit, for values with SI prefixes; None = a score, "" = a plain number."""
    rising: bool | None = None
    """Whether higher is better; None = it has no best value."""


def measures(question: Question) -> list[Measure]:
    """Return the columns that a table may have.

    Args:
        question: Metric, targets and budgets.
    """
    metric = question.metric
    rising = metric is None or higher_is_better(metric)
    found = [Measure("rounds", "rounds", unit="")]
    if metric is not None:
        found += [Measure(f"{key}_{metric}", words.format(metric), rising=rising) for key, words in _SCORES.items()]
    found += [Measure(key, words, "costs", unit, False) for key, (words, unit) in _COSTS.items()]
    found += [
        Measure("paper_bytes", "bytes, by formula", "costs", "B", False),
        Measure("density", "density", "costs"),
    ]
    for model in question.targets:
        part = f"target_{model}"
        found += [Measure(f"{part}_{name}", words, part, unit, False) for name, (words, unit) in _TO_TARGET.items()]
    for name, model, cost in _budgeted(question):
        header = budget_text(cost, question.budgets[cost])
        found.append(Measure(name, f"{AT_MOST} {header}", f"budget_{model}", rising=rising))
    return found


def budget_text(cost: Budgeted, budget: float) -> str:
    """Return a budget as words.

    Args:
        cost: Name of the cost.
        budget: Largest cost.

    Example:
        >>> budget_text("bytes", 170123), budget_text("flops", 2e9)
        ('170.123 kB up and down', '2 GFLOP of training')
    """
    scale, unit = scaled_unit(budget, BUDGETS[cost].unit)
    return f"{budget / scale:g} {unit} {BUDGETS[cost].counted}"


def _budgeted(question: Question) -> Iterator[tuple[str, str, Budgeted]]:
    """Yield the name, the model and the cost of each score within a budget."""
    for model in question.targets:
        for cost in question.budgets:
            yield f"budget_{model}_{cost}", model, cost


def part_titles(question: Question) -> dict[str, str]:
    """Return the titles of the parts of the table.

    Args:
        question: Metric, targets and budgets.
    """
    metric, targets = question.metric, question.targets
    sign = AT_LEAST if metric is None or higher_is_better(metric) else AT_MOST
    return {
        "scores": "Scores at the last evaluation",
        "costs": "Costs of all clients and rounds",
        **{f"target_{model}": f"Costs to {model} {metric} {sign} {target:g}" for model, target in targets.items()},
        **{f"budget_{model}": f"Last {model} {metric} within a budget" for model in targets},
    }


def values_of(run: Run, question: Question) -> dict[str, float]:
    """Return the values of a run for all measures; an unknown one is NaN.

    Args:
        run: Run.
        question: Metric, targets and budgets.
    """
    metric = question.metric
    values = {"rounds": float(run.rounds), **dict(_scores(run, metric) if metric is not None else ())}
    values |= {key: at_the_end(run, key) for key in _COSTS}  # type: ignore[arg-type]
    values["paper_bytes"] = last(column(run, "comm/paper_bytes_total"))
    values["density"] = last(column(run, "density/all"))
    for model, target in question.targets.items():
        spent = reached(run, f"{model}/{metric}", target)
        values |= {f"target_{model}_{name}": getattr(spent, name) for name in _TO_TARGET}
    for name, model, cost in _budgeted(question):
        values[name] = within(run, f"{model}/{metric}", cost, question.budgets[cost])
    return values


def _exceeded(group: Group, question: Question) -> set[str]:
    """Return the names of the scores within a budget that a run of a group lacks, since its evaluated rounds exceed it.

    Args:
        group: Group of runs.
        question: Metric, targets and budgets.
    """
    return {
        name
        for name, model, cost in _budgeted(question)
        if any(exceeds(run, f"{model}/{question.metric}", cost, question.budgets[cost]) for run in group.runs)
    }


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
    """Columns of which at least one run has a value, or is known to have none within a budget."""
    groups: Mapping[str, Mapping[str, MeanStd]]
    """Mean and standard deviation by group and name of the measure."""
    runs: Mapping[str, Sequence[Mapping[str, float]]]
    """Values of each run by group and name of the measure."""
    titles: Mapping[str, str]
    """Titles of the parts, also of those without a measure."""
    exceeded: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Names of the measures by group of which a run has no value, since its evaluated rounds exceed the budget."""

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


def summarize(groups: Sequence[Group], question: Question) -> Summary:
    """Compute the table of a report.

    Args:
        groups: Groups of runs.
        question: Metric, targets and budgets.
    """
    runs = {group.name: [values_of(run, question) for run in group.runs] for group in groups}
    exceeded = {group.name: _exceeded(group, question) for group in groups}
    known = {name for found in runs.values() for values in found for name in values if not math.isnan(values[name])}
    known = known.union(*exceeded.values())
    columns = [measure for measure in measures(question) if measure.name in known]
    means = {
        group: {measure.name: mean_std(values[measure.name] for values in found) for measure in columns}
        for group, found in runs.items()
    }
    return Summary(columns, means, runs, part_titles(question), exceeded)
