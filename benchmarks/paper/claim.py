"""Which method is the most accurate at equal bytes and at equal FLOPs, on the data sets of the four papers.

The measure is FedAvg: a budget is half of what FedAvg had spent at its end, or all of it. So budgets do not depend on
which other methods have been run. (The budget of the cheapest method would change with new rows, and is 0 bytes with
``Local``.) A method that needs less than the budget is compared at its end.

The accuracy of a method is that of its curve where the budget is used up, on the line between the points before and
after. Curves have 5 to 25 points: at the last point within the budget, methods would have spent between 70 and 100 % of
it, and the best would often be the one whose point happens to be near. A row from before there were curves takes part
with its end, if that is within the budget. CIFAR-10 is compared after fine-tuning, hence only with whole runs; the
costs of fine-tuning do not count.

Compared are methods of one setting, metric and number of rounds, over the seeds that all of them have; a method that
has no accuracy at seed 0 is left out. Rows that change an option of another method's cell are variants and not
compared. With fewer than two methods there is a dash.

    python benchmarks/paper/claim.py

It writes the table to docs/results.md, and a short one to README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from _data_sets import BASELINE, DATA_SETS, Group, Method, Point, groups, main_group
from _rows import DOCUMENT, REPOSITORY, RESULTS
from _tables import markdown, percent, with_table

from lightning_sparsefl.report.measures.prefix import scaled_unit

README = REPOSITORY / "README.md"
RESOURCES = {"bytes": ("bytes", "B"), "flops": ("FLOPs", "FLOP")}
"""Name and unit of the fields of a point that are budgets."""
HALF, WHOLE = 0.5, 1.0
"""Budgets, in what FedAvg spends."""
SHARES = {HALF: "half", WHOLE: "all"}
"""Names of the budgets."""
TOLERANCE = 1.01
"""What counts as within the budget, in budgets: variants of FedAvg send a few numbers more."""
FIRST_SEED = 0
"""Seed that every compared method has."""


@dataclass(frozen=True)
class Place:
    """A method within a budget."""

    label: str
    """Name of the method."""
    accuracies: Sequence[float]
    """Accuracies by seed."""
    spent: float
    """Part of the budget that the method needs to its end, at most 1; mean over seeds."""

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def percent(self) -> str:
        """Accuracy as a table shows it."""
        return percent([{"final": str(accuracy)} for accuracy in self.accuracies])


@dataclass(frozen=True)
class Ranking:
    """Methods of a group within a budget."""

    budget: float
    """Budget, mean over seeds."""
    places: Sequence[Place]
    """Methods that are compared, the best first."""
    left_out: Sequence[str]
    """Names of the methods that were not scored within the budget."""

    def of(self, label: str) -> str:
        """Return the accuracy of a method as a table shows it; a dash if it is left out."""
        return next((place.percent for place in self.places if place.label == label), "-")


def accuracy_at(points: Sequence[Point], resource: str, budget: float) -> float | None:
    """Return the accuracy of a run at a budget: at its end, or between two points; None before its first point.

    Args:
        points: Points of the run.
        resource: Key of `RESOURCES`.
        budget: What the run may spend.
    """
    costs = [getattr(point, resource) for point in points]
    if costs[-1] <= TOLERANCE * budget:
        return points[-1].accuracy
    return float(np.interp(budget, costs, [point.accuracy for point in points])) if costs[0] <= budget else None


def ranking(group: Group, resource: str, share: float) -> Ranking | None:
    """Rank the methods of a group within a budget; None for fewer than two.

    Args:
        group: Methods that can be compared.
        resource: Key of `RESOURCES`.
        share: Budget, in what FedAvg spends.
    """
    measure = group.methods.get(BASELINE, Method("")).seeds
    budgets = {seed: share * getattr(points[-1], resource) for seed, points in measure.items()}
    found = {method: _accuracies(method, resource, budgets) for method in group.methods.values()}
    compared = {method: own for method, own in found.items() if FIRST_SEED in own}
    if len(compared) < 2:
        return None
    seeds = sorted(set.intersection(*map(set, compared.values())))
    places = []
    for method, own in compared.items():
        spent = [min(1.0, getattr(method.seeds[seed][-1], resource) / budgets[seed]) for seed in seeds]
        places.append(Place(method.label, [own[seed] for seed in seeds], statistics.fmean(spent)))
    return Ranking(
        statistics.fmean(budgets[seed] for seed in seeds),
        sorted(places, key=lambda place: -place.mean),  # stable: equals stay in the order of the script's table
        [method.label for method in found if method not in compared],
    )


def _accuracies(method: Method, resource: str, budgets: Mapping[int, float]) -> dict[int, float]:
    """Return the accuracies of a method's runs within the budgets, by seed."""
    own = {seed: accuracy_at(method.seeds[seed], resource, budgets[seed]) for seed in method.seeds if seed in budgets}
    return {seed: accuracy for seed, accuracy in own.items() if accuracy is not None}


def shares(group: Group) -> tuple[float, ...]:
    """Return the budgets at which a group is compared, in what FedAvg spends."""
    return (HALF, WHOLE) if group.data_set.score == "final" else (WHOLE,)


def title(group: Group) -> str:
    """Return the data set, the setting, and which models are scored."""
    scored = "fine-tuned" if group.data_set.score == "after" else group.metric.partition("/")[0]
    return f"{group.data_set.name} ({group.setting}), {scored} models"


HEAD = ["data set", "equal", "budget", "best", "%", "spent", "second", "%", "spent", "FedAvg (%)", "methods", "seeds"]


def table(folder: Path = RESULTS) -> str:
    """Return the Markdown table of all data sets and settings, and the list of methods that are left out.

    Args:
        folder: Folder of the CSV files.
    """
    lines, notes = [], []
    for data_set in DATA_SETS:
        found = groups(data_set, folder=folder)
        own = [line for group in found for line in _lines(group)]
        lines += [cells for cells, _ in own] or [(data_set.name, *["-"] * (len(HEAD) - 1))]
        notes += [note for _, note in own if note]
    return "\n\n".join(filter(None, (markdown(HEAD, lines), "\n".join(notes))))


def _lines(group: Group) -> Iterator[tuple[Sequence[object], str]]:
    """Yield the cells of each comparison of a group, and a line with the methods that are left out."""
    for share in shares(group):
        for resource, (word, unit) in RESOURCES.items():
            if found := ranking(group, resource, share):
                scale, prefixed = scaled_unit(found.budget, unit)
                limit = f"{found.budget / scale:.3g} {prefixed} ({SHARES[share]})"
                best, second = found.places[:2]
                ends = [cell for place in (best, second) for cell in (place.label, place.percent, f"{place.spent:.2f}")]
                dense, count = found.of(group.methods[BASELINE].label), f"{len(found.places)} of {len(group.methods)}"
                cells = (title(group), word, limit, *ends, dense, count, len(best.accuracies))
                yield cells, f"- {title(group)}, {limit}: {'; '.join(found.left_out)}." if found.left_out else ""


def summary(folder: Path = RESULTS) -> str:
    """Return a short table: best and second of each data set at equal bytes and at equal FLOPs, in percent.

    The budget is half of what FedAvg spends where all methods have a curve, else all of it.

    Args:
        folder: Folder of the CSV files.
    """
    lines = [_summary(main_group(groups(data_set, folder=folder))) for data_set in DATA_SETS]
    return markdown(("data set", "budget", "at equal bytes", "at equal FLOPs"), lines)


def _summary(group: Group) -> tuple[str, ...]:
    share = HALF if all(method.has_curve for method in group.methods.values()) else WHOLE
    found = [ranking(group, resource, share) for resource in RESOURCES]
    if None in found:
        return group.data_set.name, "-", "-", "-"
    return title(group), f"{SHARES[share]} of FedAvg's", *(_ends(group, own) for own in found)


def _ends(group: Group, found: Ranking) -> str:
    """Return the best and the second, and whether the paper's own method is left out."""
    own = group.methods.get(group.data_set.own, Method("")).label
    best, second = (f"{place.label} {100 * place.mean:.1f}" for place in found.places[:2])
    return f"{best}, then {second}" + (f" ({own} needs more)" if own in found.left_out else "")


def write() -> None:
    """Write the tables to the documents that have their marks."""
    for path, text in ((DOCUMENT, table()), (README, summary())):
        document = path.read_text()
        if "<!-- claim -->\n" in document:
            path.write_text(with_table(document, "claim", text))


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write the comparison at equal costs to the documents.").parse_args()
    write()
