"""Groups of runs that differ in nothing but the seed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl.errors import InvalidOption, nearest
from lightning_sparsefl.report.reading.options import SEEDS, is_about_data
from lightning_sparsefl.report.reading.runs import Run
from lightning_sparsefl.report.shortened import short

_LONGEST_VALUE = 24
"""Maximum number of characters of an option's value in the name of a group."""


@dataclass(frozen=True)
class Group:
    """Runs of one method with equal options, which differ in the seed."""

    name: str
    """Name of the group: the method, and the options that differ between runs of the method."""
    runs: tuple[Run, ...]
    """Runs of the group."""
    options: Mapping[str, Any]
    """Values of all options that differ between the groups of a report; an option that is not set is missing."""


def group_runs(
    runs: Sequence[Run],
    by: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    different_data: bool = False,
) -> list[Group]:
    """Group runs by their method and the options that differ, seeds excluded.

    Args:
        runs: Runs.
        by: Dotted names of the options to group by; None = the method and all options that differ.
        only: Names of the groups to return; None = all.
        different_data: Whether runs on different data are accepted; the options of the data then separate groups too.

    Returns:
        Groups in the order of their first runs.

    Raises:
        InvalidOption: If the runs are of different data, or an option or a group is unknown.
    """
    differing = _differing(runs)
    if not different_data:
        _require_same_data(runs, differing)
    keys = differing if by is None else _known_options(by, runs)
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(tuple(_text(run, key) for key in keys), []).append(run)
    firsts = [found[0] for found in members.values()]
    names = _unique([_name(run, firsts, keys, by is None) for run in firsts])
    groups = [
        Group(name, tuple(found), {key: _value(found[0], key) for key in keys if _value(found[0], key) is not None})
        for name, found in zip(names, members.values(), strict=True)
    ]
    return _chosen(groups, only)


def _value(run: Run, key: str) -> Any:
    return run.options.get(key)


def _text(run: Run, key: str) -> str:
    """Return the value of an option to compare: 1 batch is not the same as 1.0, all batches."""
    return repr(_value(run, key))


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the options with several values: those of a method among its own runs only, and the method itself."""
    names = dict.fromkeys(name for run in runs for name in run.options if name not in SEEDS)
    return ["algorithm", *(name for name in names if name != "algorithm" and _differs(name, runs))]


def _differs(name: str, runs: Iterable[Run]) -> bool:
    if not name.startswith("algorithm."):
        return len({_text(run, name) for run in runs}) > 1
    values: dict[str, set[str]] = {}
    for run in runs:
        values.setdefault(run.method, set()).add(_text(run, name))
    return any(len(found) > 1 for found in values.values())


def _require_same_data(runs: Sequence[Run], differing: Sequence[str]) -> None:
    name = next((name for name in differing if is_about_data(name)), None)
    if name is not None:
        first = runs[0]
        other = next(run for run in runs if _text(run, name) != _text(first, name))
        raise InvalidOption(
            f"The runs are of different data: `{name}` is {_shown(_value(first, name))} in {first.path}, and "
            f"{_shown(_value(other, name))} in {other.path}; expected runs of the same data, or `--different_data`."
        )


def _known_options(by: Sequence[str], runs: Sequence[Run]) -> list[str]:
    known = dict.fromkeys(name for run in runs for name in run.options)
    for name in by:
        if name not in known:
            near = nearest(name.rpartition(".")[2], [key.rpartition(".")[2] for key in known])
            named = [key for key in known if key.rpartition(".")[2] == near] or list(known)[:2]
            raise InvalidOption(
                f"`by` is '{name}', which no run has as an option; expected the dotted name of an option, such as "
                f"{' or '.join(named)}."
            )
    return list(dict.fromkeys(by))


def _name(run: Run, firsts: Sequence[Run], keys: Sequence[str], with_method: bool) -> str:
    """Return the name of a group: the method, with the options that differ between the groups of this method."""
    rivals = [other for other in firsts if other.method == run.method] if with_method else firsts
    told = [key for key in keys if key != "algorithm" and len({_text(other, key) for other in rivals}) > 1]
    if with_method:
        told = [key for key in told if not _follows(key, told, run, rivals)]
    short = Counter(map(_last_part, told))
    parts = [f"{key if short[_last_part(key)] > 1 else _last_part(key)}={_shown(_value(run, key))}" for key in told]
    if not with_method and "algorithm" not in keys:
        return ", ".join(parts) or "all runs"
    return f"{run.method} ({', '.join(parts)})" if parts else run.method


def _follows(key: str, differing: Sequence[str], run: Run, rivals: Sequence[Run]) -> bool:
    """Return whether an option belongs to a class that differs, and is equal in all groups that share the class."""
    classes = [name for name in differing if key.startswith(f"{name}.")]
    peers = [other for other in rivals if all(_text(other, name) == _text(run, name) for name in classes)]
    return bool(classes) and len({_text(other, key) for other in peers}) == 1


def _last_part(key: str) -> str:
    """Return the last part of an option's name, with the one before it if it is a place in a list."""
    before, _, last = key.rpartition(".")
    return f"{_last_part(before)}.{last}" if last.isdecimal() and before else last


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    if len(text) > _LONGEST_VALUE and re.fullmatch(r"(\w+\.)+\w+", text):  # the import path of a class
        text = text.rpartition(".")[2]
    return short(" ".join(text.split()), _LONGEST_VALUE)


def _unique(names: Sequence[str]) -> list[str]:
    """Append numbers to names that several groups have, whose differences are too long to be shown."""
    counts, seen = Counter(names), Counter[str]()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return unique


def _chosen(groups: Sequence[Group], only: Sequence[str] | None) -> list[Group]:
    names = [group.name for group in groups]
    for name in only or ():
        if name not in names:
            raise InvalidOption(
                f"`group` is '{name}', which is not a group of these runs; expected some of {', '.join(names)}."
            )
    return [group for group in groups if only is None or group.name in only]
