"""The data sets of the four papers, and what the runs of each method had spent whenever they were scored."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from _rows import RESULTS, Row, read

BASELINE = "fedavg"
"""Method whose costs are the measure."""


@dataclass(frozen=True)
class DataSet:
    """A data set and the runs on it that can be compared."""

    name: str
    """Name of the data set."""
    script: str
    """Script of the runs, and name of the files with their rows."""
    own: str
    """Key of the paper's method."""
    settings: Mapping[str, str]
    """Patterns for the names of runs with equal rounds, network, data and local work, whose first group is the key of
    the method; the setting that is preferred first."""
    score: str = "final"
    """Column of the accuracy after a run; "after" has no curve, since models are only fine-tuned at the end."""


DATA_SETS = (
    DataSet("MNIST", "fedlps_mnist", "fedlps", {"5 epochs": r"(.+)(?<!-steps)", "5 steps": "(.+)-steps"}),
    DataSet("Fashion-MNIST", "feddip_fashion", "feddip", {f"T {rounds}": f"(.+)-T{rounds}" for rounds in (1000, 200)}),
    DataSet(
        "EMNIST-Letters",
        "fedspa_emnist",
        "fedspa_dst",
        {f"{place.upper()}, T {rounds}": f"{place}-(.+)-T{rounds}" for rounds in (400, 100) for place in "ba"},
    ),
    DataSet("CIFAR-10", "perfedmask_cifar10", "optimized", {"small CNN": "(?!mobilenet)(.+)"}, score="after"),
)


@dataclass(frozen=True)
class Point:
    """A score of a run, and what the run had spent by then."""

    rounds: int
    """Number of finished rounds."""
    accuracy: float
    """Accuracy in [0, 1]."""
    bytes: float
    """Encoded bytes, both ways."""
    flops: float
    """Training FLOPs."""
    simulated: float | None = None
    """Simulated seconds; None without simulated devices."""


@dataclass(frozen=True, eq=False)
class Method:
    """The finished runs of a method."""

    label: str
    """Name in tables."""
    seeds: dict[int, Sequence[Point]] = field(default_factory=dict)
    """Points of a run in the order of rounds by its seed; the last one is the end of the run."""

    @property
    def has_curve(self) -> bool:
        """Whether a run has more points than its end."""
        return any(len(points) > 1 for points in self.seeds.values())


@dataclass(frozen=True)
class Group:
    """Methods that can be compared: one data set, setting, metric and number of rounds."""

    data_set: DataSet
    """Data set."""
    setting: str
    """Key of the data set's settings."""
    metric: str
    """Metric of all runs, such as ``personal/test_acc``."""
    methods: Mapping[str, Method]
    """Methods with at least one finished run by their key, in the order of the script's table; no variants of one."""


def groups(data_set: DataSet, score: str | None = None, folder: Path = RESULTS) -> list[Group]:
    """Return the methods of each setting of a data set.

    Args:
        data_set: Data set.
        score: Column of the accuracy after a run. Default: that of the data set.
        folder: Folder of the CSV files.
    """
    rows, curves = (read(folder / f"{data_set.script}{suffix}.csv") for suffix in ("", "_curves"))
    return [_group(data_set, setting, score or data_set.score, rows, curves) for setting in data_set.settings]


def main_group(found: Sequence[Group]) -> Group:
    """Return the group with the most methods; of several, the first."""
    return max(found, key=lambda group: len(group.methods))


def _group(data_set: DataSet, setting: str, score: str, rows: Iterable[Row], curves: Sequence[Row]) -> Group:
    content, pattern = _content(data_set.script), re.compile(data_set.settings[setting])
    planned = {run.name: run for run in content["RUNS"] if pattern.fullmatch(run.name)}
    metric = next(iter(planned.values())).metric
    methods = {key: Method(label) for key, label in _labels(content["METHODS"]).items()}
    own = [row for row in rows if row["run"] in planned and planned[row["run"]].metric == metric and row[score]]
    for row in own:
        method = methods.get(pattern.fullmatch(row["run"])[1])
        if method is not None and row["rounds"] == own[0]["rounds"]:
            method.seeds[int(row["seed"])] = _points(row, curves if score == "final" else (), score)
    return Group(data_set, setting, metric, {key: method for key, method in methods.items() if method.seeds})


def _labels(methods: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return the labels of the methods with a cell of their own, which variants share with the first."""
    first: dict[str, str] = {}
    for key, (*_, cell, _) in methods.items():
        first.setdefault(cell, key)
    return {key: methods[key][0] for key in first.values()}


def _points(row: Row, curves: Iterable[Row], score: str) -> list[Point]:
    """Return the points of a run's curve, and its end, which a run from before there were curves has as well."""
    end = Point(
        int(row["rounds"]),
        float(row[score]),
        float(row["bytes_down"]) + float(row["bytes_up"]),
        float(row["flops_train"]),
        float(row["simulated"]) if row["simulated"] else None,
    )
    own = [point for point in curves if (point["run"], point["seed"]) == (row["run"], row["seed"])]
    points = [
        Point(
            int(point["round"]) + 1,
            float(point["accuracy"]),
            float(point["bytes"]),
            float(point["flops"]),
            float(point["simulated"]) if point["simulated"] else None,
        )
        for point in own
    ]
    return [*(point for point in points if point.rounds < end.rounds), end]


@cache
def _content(script: str) -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parent / f"{script}.py"))
