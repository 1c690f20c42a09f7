"""Promises: named checks that raise :class:`BrokenPromise` with one sentence."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import sysconfig
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from torch.multiprocessing import ProcessRaisedException

_Subject = TypeVar("_Subject")
_Bench = TypeVar("_Bench")
_NOT_THE_USERS = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of this package, of Python and of installed packages."""


class BrokenPromise(AssertionError):
    """Promise that a method, a callback, a sampler, a reducer or a partition does not hold.

    Args:
        subject: Name of the class that was checked.
        check: Function that checked it.
        difference: Clause that says what differed.
    """

    def __init__(self, subject: str, check: Callable[..., None], difference: str) -> None:
        self.promise, self.difference = check.__name__, difference
        super().__init__(
            f"`{subject}` breaks the promise `{self.promise}` ({summary(check)}): {difference}; "
            f"read `help({check.__module__}.{self.promise})`."
        )


class Difference(Exception):
    """Clause that says what a check found to differ; :func:`promise` makes a sentence of it."""


def promise(check: Callable[[_Subject, _Bench], None]) -> Callable[[_Subject, _Bench], None]:
    """Decorate a check, so that whatever it finds, errors included, is raised as a :class:`BrokenPromise`.

    Args:
        check: Function of a method or callback and of what runs it; the first line of its docstring is the promise.
    """

    @wraps(check)
    def checked(subject: _Subject, bench: _Bench) -> None:
        name = type(subject).__name__
        try:
            check(subject, bench)
        except Exception as error:
            raise BrokenPromise(name, check, _clause(error)) from error

    return checked


def _clause(error: BaseException) -> str:
    """Return what a check found: the difference behind an error, such as that of a client, or its first sentence."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Difference):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ProcessRaisedException):  # whose message is a traceback
        last = str(error).strip().splitlines()[-1]
        return re.sub(r"^(?:\w+\.)+(?=\w+:)", "", last).partition(". ")[0].rstrip(".;")
    said = " ".join(str(error).split()).partition(". ")[0].rstrip(".;")
    return (f"{type(error).__name__}: {said}" if said else type(error).__name__) + _place(error)


def _place(error: BaseException) -> str:
    """Return the last line of the user's code that led to an error or to its cause, in parentheses; empty if none."""
    cause: BaseException | None = error
    place = ""
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if not any(Path(frame.filename).is_relative_to(folder) for folder in _NOT_THE_USERS):
                place = f" ({Path(frame.filename).name}, line {frame.lineno})"
        cause = cause.__cause__ or cause.__context__
    return place


def summary(check: Callable[..., Any]) -> str:
    """Return the promise that a check states: the first line of its docstring, after "Check that".

    Example:
        >>> def holds(method, federation):
        ...     '''Check that all is well.'''
        >>> summary(holds)
        'all is well'
    """
    return (inspect.getdoc(check) or "").partition("\n")[0].removeprefix("Check that ").rstrip(".")


def require_frozen_value(subject: Any) -> None:
    """Raise :class:`Difference` unless an object is a frozen dataclass that can be pickled, and equal to its copy.

    A class that compares objects by their identity, as with ``dataclass(eq=False)``, need not be equal.

    Args:
        subject: Object that is checked.
    """
    require(dataclasses.is_dataclass(subject), "it is no dataclass; decorate it with `dataclass(frozen=True)`")
    try:
        subject.anything = 1
    except (dataclasses.FrozenInstanceError, AttributeError):
        pass
    else:
        raise Difference("its attributes can be set; decorate it with `dataclass(frozen=True)`")
    try:
        pickle.dumps(subject)
    except Exception as error:
        raise Difference(f"it cannot be pickled, as for a spawned process: {error}") from error
    compares = "__eq__" in vars(type(subject))
    require(not compares or copy.deepcopy(subject) == subject, "its copy is not equal to it")


def require(condition: bool, difference: str) -> None:
    """Raise :class:`Difference` unless a condition holds.

    Args:
        condition: Whether all is as promised.
        difference: Clause that says what is not.

    Raises:
        Difference: If `condition` is false.
    """
    if not condition:
        raise Difference(difference)
