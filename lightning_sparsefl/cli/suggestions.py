"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_LEAST_SIMILARITY = 0.65


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the most similar known name, to be appended to a message; empty without one.

    Args:
        word: Name that is not known.
        known: Known names.

    Example:
        >>> did_you_mean("densty", ["density", "growth"])
        '; did you mean `density`?'
        >>> did_you_mean("fedavg", ["FedAvg", "FedProx"])
        '; did you mean `FedAvg`?'
        >>> did_you_mean("mu", ["density"])
        ''
    """
    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, n=1, cutoff=_LEAST_SIMILARITY)
    return f"; did you mean `{names[found[0]]}`?" if found else ""


def import_path(path: str) -> Any:
    """Return the object of a dotted import path, or None if it cannot be imported.

    Args:
        path: Import path of a module, or of an object in a module.
    """
    package, _, name = path.rpartition(".")
    for module, attribute in ((path, None), (package, name)):
        try:
            found = import_module(module)
        except (ImportError, ValueError):
            continue
        return found if attribute is None else getattr(found, attribute, None)
    return None
