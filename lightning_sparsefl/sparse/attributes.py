"""Attributes of an object that are replaced for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    with attributes_replaced(owner, {name: value}):
        yield


@contextmanager
def attributes_replaced(owner: Any, values: Mapping[str, Any], others: Iterable[str] = ()) -> Iterator[None]:
    """Give an object attributes of its own until the end of the context, and then those that it had.

    Args:
        owner: Object with a ``__dict__``, such as a module, which may have the attributes from its class alone.
        values: Attributes within the context, in which they may be set again or deleted.
        others: Names of attributes that have their values of before after the context as well.

    Example:
        >>> from types import SimpleNamespace
        >>> layer = SimpleNamespace(scale=1, shift=3)
        >>> with attributes_replaced(layer, {"scale": 2, "seen": True}, ["shift"]):
        ...     layer.shift = layer.scale
        >>> layer
        namespace(scale=1, shift=3)
    """
    table = vars(owner)
    before = {name: table.get(name, _MISSING) for name in (*values, *others)}
    table.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                table.pop(name, None)
            else:
                table[name] = value
