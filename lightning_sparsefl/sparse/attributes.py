"""Attributes of an object that are replaced for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

_MISSING = object()


@cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes that the objects of a class have in `__slots__`, also of its bases.

    Args:
        kind: The class.

    Example:
        >>> class Meter:
        ...     __slots__ = ("total", "__number")
        >>> slots_of(Meter)
        ('total', '_Meter__number')
    """
    names: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        hidden = f"_{base.__name__.lstrip('_')}"
        found = [own] if isinstance(own, str) else own
        names += [f"{hidden}{name}" if name.startswith("__") and name[-2:] != "__" else name for name in found]
    return tuple(name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__"))


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
