"""Cases of a test that are marked `slow`, and so left out of a plain `pytest`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import pytest


def first_then_slow(values: Iterable[Any], by: Callable[[Any], Hashable] = lambda value: None) -> list[Any]:
    """Return the values of one parameter; all but the first, or the first of each `by`, marked `slow`."""
    seen: set[Hashable] = set()
    marked = []
    for value in values:
        key = by(value)
        marked.append(pytest.param(value, marks=pytest.mark.slow) if key in seen else value)
        seen.add(key)
    return marked


def keep_named_tests(config: pytest.Config) -> None:
    """Select slow tests too where the command line names a test by its id, as in `file.py::test`."""
    if config.option.markexpr == "not slow" and any("::" in argument for argument in config.args):
        config.option.markexpr = ""


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as `slow` the cases that the marker `slow_after_first` names."""
    firsts: dict[str, Mapping[str, Any]] = {}
    for item in items:
        marker = item.get_closest_marker("slow_after_first")
        if marker:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            first = firsts.setdefault(item.nodeid.partition("[")[0], values)
            if not is_first(values, first, marker.args):
                item.add_marker(pytest.mark.slow)


def is_first(values: Mapping[str, Any], first: Mapping[str, Any], parameters: Collection[str]) -> bool:
    """Return whether the named parameters of a case, by default all of them, have the values of the first case.

    The values are those of the test's lists, so that equal ones are the same object.
    """
    if unknown := set(parameters) - set(values):
        raise pytest.UsageError(f"slow_after_first names {sorted(unknown)}, not among {sorted(values)}")
    return all(values[name] is first[name] for name in parameters or values)


class TimeLimit:
    """Plugin that leaves out slow tests that would start after a time limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a slow test after the limit."""
        if item.get_closest_marker("slow") and time.monotonic() > self._end:
            pytest.skip("slow, and the limit of --slow-seconds is reached")
