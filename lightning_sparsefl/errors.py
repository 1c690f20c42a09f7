"""Exceptions of the package.

::

    SparseFLError
    |-- InvalidOption        (also ValueError)         an invalid value of an option, or combination of options
    |-- IncompatibleMasks    (also ValueError)         masks or weights that do not match each other
    |-- InvalidUpdate        (also ValueError)         an update of a method that does not match its message
    |-- MalformedPayload     (also ValueError)         bytes that are not a valid message
    |-- DataNotFound         (also FileNotFoundError)  a data set that is not on disk
    |-- CheckpointMismatch   (also ValueError)         a checkpoint that is truncated, foreign or of another run
    |-- ExportMismatch       (also RuntimeError)       an exported file that does not score as its model does
    |-- DiskFull             (also OSError)            no space left; committed rounds are intact
    |-- WorldSizeMismatch    (also RuntimeError)       the launcher started another number of processes
    |-- MissingAttribute     (also AttributeError)     an attribute that a round-level trainer does not have
    |-- RankFailed           (also RuntimeError)       another process failed
    |-- RanksDisagree        (also RuntimeError)       the server states of the ranks differ; has `parts`, `round`
    |-- EvaluationFailed     (also RuntimeError)       the evaluation of the global model failed
    `-- ClientFailed         (also RuntimeError)       the local work of a client failed; has `client`, `round`, `rank`

Every message states the value, what was expected and the option to change. The command line prints the message
without a traceback and exits with code 2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from inspect import isabstract
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LEAST_SIMILARITY = 0.65
"""Similarity below which a name is not suggested, from 0 to 1."""
_LEAST_START = 3
"""Number of letters from which on the start of a name suggests it."""
_LISTS = {list, tuple, Sequence}
"""Types that annotate lists of numbers or strings."""


class SparseFLError(Exception):
    """Base class of the exceptions of this package."""


class InvalidOption(SparseFLError, ValueError):
    """Invalid value of an option, or invalid combination of options."""


def require(condition: bool, option: str, value: Any, expected: str) -> None:
    """Raise :class:`InvalidOption` unless an option satisfies a condition.

    Args:
        condition: Whether the value is valid.
        option: Dotted name of the option: as on the command line (``federation.min_clients``), or with the name of the
            class where the option has no fixed place in a config (``StaticMask.density``).
        value: Value of the option; the message shows its ``repr``.
        expected: Description of the valid values, without a final full stop; a hint about what else to change may
            follow after a semicolon.

    Raises:
        InvalidOption: If `condition` is false.

    Example:
        >>> density = 2.0
        >>> require(0 < density <= 1, "algorithm.density", density, "a number in (0, 1]")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `algorithm.density` is 2.0; expected a number in (0, 1].
    """
    if not condition:
        raise InvalidOption(f"`{option}` is {value!r}; expected {expected}.")


def nearest(word: str, known: Iterable[str], least: float = _LEAST_SIMILARITY) -> str | None:
    """Return the known name that is most similar to a word, to be suggested in a message; None if none is similar.

    A word of three letters or more also suggests the only name that starts with it.

    Args:
        word: Name that is not known.
        known: Known names.
        least: Least similarity, from 0 to 1, of a name that is suggested and does not start with the word.

    Example:
        >>> nearest("densty", ["density", "growth"]), nearest("fedavg", ["FedAvg", "FedProx"])
        ('density', 'FedAvg')
        >>> nearest("mu", ["density"])
        >>> nearest("csv", ["CSVLogger", "WandbLogger"])
        'CSVLogger'
    """
    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, n=1, cutoff=least)
    if not found and len(word) >= _LEAST_START:
        found = [name for name in names if name.startswith(word.lower())]
    return names[found[0]] if len(found) == 1 else None


def require_folder(option: str, path: Path) -> None:
    """Raise :class:`InvalidOption` if something that is no folder lies where one will be written.

    Args:
        option: Name of the option.
        path: Path of the folder, which need not exist.
    """
    if path.exists() and not path.is_dir():
        raise InvalidOption(f"`{option}` is '{path}', which is a file; expected a folder, which is created if needed.")


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number that is not too small; a bool is not a number.

    Args:
        value: Value of an option.
        least: Smallest valid number.

    Example:
        >>> is_whole(3, 1), is_whole(0, 1), is_whole(True, 1), is_whole(2.0, 1)
        (True, False, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which a bool is not.

    Args:
        value: Value of an option.

    Example:
        >>> is_number(1), is_number(0.5), is_number(True), is_number("1")
        (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_infinite(value: Any) -> bool:
    """Return whether a value is an infinite number, which most bounds of options do not exclude.

    Args:
        value: Value of an option, of any type.

    Example:
        >>> is_infinite(0.5), is_infinite(float("-inf")), is_infinite("inf")
        (False, True, False)
    """
    return is_number(value) and value in (math.inf, -math.inf)


def check_types(options: Any, prefix: str) -> None:
    """Raise :class:`InvalidOption` if a field has another type than its annotation, or is an infinite number.

    See :func:`type_check`.

    Args:
        options: Dataclass with the options.
        prefix: Prefix of the names of fields in the error message.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     density: float = 0.5
        ...     growth: Literal["gradient", "random"] = "random"
        >>> check_types(Options("0.5"), "algorithm.")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `algorithm.density` is '0.5'; expected a number.
        >>> check_types(Options(growth="none"), "algorithm.")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `algorithm.growth` is 'none'; expected one of 'gradient', 'random'.
    """
    for name, (fits, expected) in type_checks(options.__class__).items():
        value = getattr(options, name)
        require(fits(value), f"{prefix}{name}", value, expected)
        require(not is_infinite(value), f"{prefix}{name}", value, "a finite number")


@cache  # by the class or function: annotations of `Literal` are equal in any order of their values
def type_checks(annotated: Any) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Return the result of :func:`type_check` for each annotation.

    Args:
        annotated: Dataclass or function.
    """
    return {name: type_check(hint) for name, hint in get_type_hints(annotated).items()}


def type_check(hint: Any) -> tuple[Callable[[Any], bool], str]:
    """Return whether a value fits an annotation, as a function, and what is expected of it in a message.

    Numbers, strings, lists of them, mappings, classes and `Literal` are checked, each with or without None; any value
    fits other annotations.

    Args:
        hint: Annotation of the option, resolved by ``get_type_hints``.

    Example:
        >>> fits, expected = type_check(list[int] | None)
        >>> fits([1, 2.5]), fits(None), expected
        (False, True, 'a list of numbers or null')
        >>> fits, expected = type_check(int | str)
        >>> fits(1), fits(True), fits(1.5), expected
        (True, False, False, 'a whole number or a string')
    """
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in alternatives if kind is not NoneType]
    fits, expected = _check_of_kinds(kinds)
    if len(kinds) == len(alternatives):
        return fits, expected
    return lambda value: value is None or fits(value), expected + (", or null" if "," in expected else " or null")


def _check_of_kinds(kinds: Sequence[Any]) -> tuple[Callable[[Any], bool], str]:
    """Return the check of the alternatives of an annotation, without None."""
    origins = {get_origin(kind) for kind in kinds}
    inner = [item for kind in kinds for item in get_args(kind) if item is not Ellipsis]
    numbers = [kind for kind in kinds if kind in (int, float)]
    number = f"a {'' if float in kinds else 'whole '}number"
    if len(numbers) == len(kinds):
        return partial(_is_of, kinds), number
    if origins == {Literal}:
        return inner.__contains__, "one of " + ", ".join(map(repr, inner))
    if origins == {Mapping}:
        return lambda value: isinstance(value, Mapping), "a mapping from names"
    if inner and all(item in (int, float) for item in inner) and origins <= _LISTS:
        return partial(_is_list, partial(_is_of, inner)), "a list of numbers"
    names = bool(inner) and all(item is str for item in inner)
    if names and all(kind is str or get_origin(kind) in _LISTS for kind in kinds):
        texts = partial(_is_list, lambda item: isinstance(item, str))
        if str not in kinds:
            return texts, "a list of strings"
        return lambda value: isinstance(value, str) or texts(value), "a string or a list of strings"
    if origins == {None} and all(isinstance(kind, type) for kind in kinds):
        classes = tuple(kind for kind in kinds if kind not in numbers)
        expected = " or ".join([*([number] if numbers else ()), *map(_described, classes)])
        return lambda value: isinstance(value, classes) or (bool(numbers) and _is_of(numbers, value)), expected
    return lambda value: True, ""


def _is_list(fits: Callable[[Any], bool], value: Any) -> bool:
    """Return whether a value is a list, or like one, of items that fit."""
    return isinstance(value, Collection) and not isinstance(value, str) and all(map(fits, value))


def require_type(option: str, value: Any, hint: Any) -> None:
    """Raise :class:`InvalidOption` if an option does not fit an annotation; see :func:`type_check`.

    Args:
        option: Dotted name of the option.
        value: Value of the option.
        hint: The annotation.

    Example:
        >>> require_type("data.num_clients", "ten", int | None)
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `data.num_clients` is 'ten'; expected a whole number or null.
    """
    fits, expected = type_check(hint)
    require(fits(value), option, value, expected)


def _described(kind: type) -> str:
    """Return what the objects of a class are called in a message, with an example of an abstract class."""
    if kind in (bool, str):
        return "True or False" if kind is bool else "a string"
    known: list[type] = kind.__subclasses__() if isabstract(kind) else []
    own = [each.__name__ for each in known if each.__module__.startswith("lightning_sparsefl.")]
    return f"an instance of `{kind.__name__}`" + "".join(f", such as `{name}`" for name in own[:1])


def _is_of(kinds: Container[Any], value: Any) -> bool:
    """Return whether a value is a number, and whole unless `float` is among its types."""
    return is_number(value) and (float in kinds or isinstance(value, Integral))


def whole_number_from_environment(name: str, default: int | None = None, *, remedy: str) -> int:
    """Return the value of an environment variable.

    Args:
        name: Name of the variable.
        default: Value if the variable is not set. Default: it must be set.
        remedy: Clause of the message that says what to do, without a final full stop.

    Raises:
        InvalidOption: If the variable is not a whole number >= 0, or not set without a default.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        found = "not set" if text is None else repr(text)
        raise InvalidOption(f"The environment variable {name} is {found}; expected a whole number >= 0: {remedy}.")
    return int(text)


class IncompatibleMasks(SparseFLError, ValueError):
    """Masks or weights whose names, shapes or types do not match."""


class InvalidUpdate(SparseFLError, ValueError):
    """Update that does not match its message, which is an error of the method and not of a client."""


class MalformedPayload(SparseFLError, ValueError):
    """Bytes that are not a valid message of this package, for example a truncated one."""


class DataNotFound(SparseFLError, FileNotFoundError):
    """Data set that is not on disk."""


class CheckpointMismatch(SparseFLError, ValueError):
    """Checkpoint that is truncated, not of this package, or of another run."""


class ExportMismatch(SparseFLError, RuntimeError):
    """Exported file whose scores differ from those of its model."""


class DiskFull(SparseFLError, OSError):
    """Disk without space for the next commit of a run; the committed rounds are intact."""


class WorldSizeMismatch(SparseFLError, RuntimeError):
    """Number of processes of the launcher that differs from the configuration."""


class MissingAttribute(SparseFLError, AttributeError):
    """Attribute that a callback reads and a round-level trainer does not have."""


class RankFailed(SparseFLError, RuntimeError):
    """Failure of another process that this process would otherwise wait for."""


class EvaluationFailed(SparseFLError, RuntimeError):
    """Failure of the evaluation of the global model; the cause is the error of the user's code."""


class RanksDisagree(SparseFLError, RuntimeError):
    """Difference between the server states of two ranks after a round; the round is not committed.

    Args:
        parts: Names of the parts of the server state that differ: weights, masks, extra, or client records.
        round: Number of the round, from 0.
        rank: First rank whose state differs from that of rank 0.
    """

    def __init__(self, parts: Sequence[str], *, round: int, rank: int) -> None:
        super().__init__(
            f"After round {round} the server's {', '.join(parts)} on rank {rank} differ from those on rank 0; expected "
            "`aggregate` and `observe` to return equal results on every rank: derive their randomness from the seed "
            "and the round, run the same software on all nodes, and resume with `--ckpt_path last`."
        )
        self.parts, self.round, self.rank = tuple(parts), round, rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, so that the exception can be sent between processes."""
        return partial(type(self), self.parts, round=self.round, rank=self.rank), ()


def _advice_if_too_few(left: int, min_clients: int) -> str:
    """Return the clause for a round of which too few clients are left; without any, no smaller number helps."""
    if left == 0:
        return "no other client of the round succeeded, so that nothing can be merged; correct the cause"
    clients = "1 client" if left == 1 else f"{left} clients"
    return f"this leaves {clients}, but `federation.min_clients` is {min_clients}; lower it"


class ClientFailed(SparseFLError, RuntimeError):
    """Failure of the local training or evaluation of a client.

    Args:
        reason: Reason for the failure, a clause that the message contains.
        client: Number of the client.
        round: Number of the round, from 0.
        rank: Rank on which the client failed.
        left: Number of remaining clients and `federation.min_clients`, with `federation.on_client_error: skip`.
        replay: Command or call that repeats the local fit.
        during: Phase in which the client failed: the training of a round, a survey of all clients before round 0, a
            scoring, also after a last local fit, or the simulation of `profile`.
    """

    def __init__(
        self,
        reason: str,
        *,
        client: int,
        round: int,
        rank: int,
        left: tuple[int, int] | None = None,
        replay: str | None = None,
        during: Literal["training", "survey", "scoring", "simulation"] = "training",
    ) -> None:
        super().__init__(reason)
        self.reason, self.client, self.round, self.rank = reason, client, round, rank
        self.left, self.replay, self.during = left, replay, during

    def __str__(self) -> str:
        """Return the message, followed by how to repeat the fit if that is known."""
        client, reason = f"Client {self.client}", self.reason.removesuffix(".")
        if self.during == "simulation":
            where = f"{client} failed in round {self.round} of the simulation, which calls no hook of a callback"
            return f"{where}: {reason}."
        if self.during == "survey":
            where = f"{client} failed before round 0 on rank {self.rank}, when the method asked all clients"
            return f"{where}: {reason}; each of them must answer."
        advice = "if other clients do not fail, `federation.on_client_error: skip` merges the round without it"
        if self.left is not None:
            advice = _advice_if_too_few(*self.left)
        failed = "failed"
        if self.during == "scoring":
            failed, advice = "has no scores", "`federation.on_client_error: skip` leaves it out of the scores"
        message = f"{client} {failed} in round {self.round} on rank {self.rank}: {reason}; {advice}."
        return message if self.replay is None else f"{message}\nTo run that local fit again: {self.replay}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, so that the exception can be sent between processes."""
        facts = {name: getattr(self, name) for name in ("client", "round", "rank", "left", "replay", "during")}
        return partial(type(self), self.reason, **facts), ()
