"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from lightning_sparsefl.errors import nearest


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the most similar known name, to be appended to a message; empty without one.

    Args:
        word: Name that is not known.
        known: Known names.

    Example:
        >>> did_you_mean("densty", ["density", "growth"])
        '; did you mean `density`?'
        >>> did_you_mean("mu", ["density"])
        ''
    """
    found = nearest(word, known)
    return "" if found is None else f"; did you mean `{found}`?"


def no_subcommand(known: Iterable[str]) -> str:
    """Return the message for a command line without a subcommand.

    Args:
        known: Names of the subcommands.
    """
    return f"No subcommand is given; expected one of {', '.join(known)}."


def unknown_subcommand(word: str, known: Iterable[str]) -> str:
    """Return the message for a subcommand that does not exist.

    Args:
        word: Word in the place of the subcommand.
        known: Names of the subcommands.

    Example:
        >>> unknown_subcommand("exprt", ["fit", "export"])
        '`exprt` is not a subcommand; did you mean `export`?'
    """
    names = list(known)
    return f"`{word}` is not a subcommand" + (did_you_mean(word, names) or f"; expected one of {', '.join(names)}.")


def import_path(path: str) -> Any:
    """Return the object of a dotted import path, or None if it cannot be imported.

    Args:
        path: Import path of a module, or of an object in a module.
    """
    package, _, name = path.rpartition(".")
    for module, attribute in ((path, None), (package, name)):
        try:
            found = import_module(module)
        except Exception:  # what a module raises is reported where its name was given
            continue
        return found if attribute is None else getattr(found, attribute, None)
    return None
