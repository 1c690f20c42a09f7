"""Attributes of an object that are replaced for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own until the end of the context, and then the one that it had.

    Args:
        owner: Object with a ``__dict__``, such as a module, which may have the attribute from its class alone.
        name: Name of the attribute.
        value: Value within the context, in which it may be set again or deleted.

    Example:
        >>> from types import SimpleNamespace
        >>> layer = SimpleNamespace(scale=1)
        >>> with attribute_replaced(layer, "scale", 2):
        ...     layer.scale
        2
        >>> layer.scale
        1
    """
    table = vars(owner)
    before = table.get(name, _MISSING)
    table[name] = value
    try:
        yield
    finally:
        table.pop(name, None)
        if before is not _MISSING:
            table[name] = before
