"""The contents of lists, dicts, sets and deques, to be restored."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

CONTAINERS = (dict, list, set, deque)
"""Types of containers that are changed in place."""
HOLDERS = (*CONTAINERS, tuple)
"""Types of values that may hold containers."""
LARGE = 10_000
"""Number of items, with those of inner containers, from which on a container is not copied: data costs little."""


def fill(container: Any, content: Any) -> Any:
    """Give a container another content, and return it.

    Args:
        container: List, dict, set or deque.
        content: The content: a dict for a dict, else an iterable of the items.

    Example:
        >>> fill([1, 2], [3])
        [3]
    """
    content = dict(content) if isinstance(content, dict) else list(content)
    container.clear()
    if isinstance(container, dict):
        for key, value in content.items():  # since `update` of a Counter adds
            container[key] = value
    else:
        container.update(content) if isinstance(container, set) else container.extend(content)
    return container


def content_of(container: Any) -> Any:
    """Return a copy of the content of a container: a dict, or a list of the items.

    Args:
        container: List, dict, set or deque.

    Example:
        >>> content_of(deque([1, 2], maxlen=3))
        [1, 2]
    """
    return dict(container) if isinstance(container, dict) else list(container)


def has_content(container: Any, content: Any) -> bool:
    """Return whether a container has the same objects in the same order.

    Args:
        container: List, dict, set or deque.
        content: Result of :func:`content_of`.

    Example:
        >>> has_content([1, 2], [1, 2]), has_content({"a": 1}, {"a": 1, "b": 2})
        (True, False)
    """
    if len(container) != len(content) or not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))


def containers_in(value: Any) -> list[Any] | None:
    """Return a container with the containers in it, also those in tuples; None if they have too many items.

    Args:
        value: Value of any kind; one that is neither a container nor a tuple has none.

    Example:
        >>> containers_in({"a": [1], "b": (2, [3])})
        [{'a': [1], 'b': (2, [3])}, [1], [3]]
        >>> containers_in(list(range(10_000)))
    """
    found = values_in(value)
    return None if found is None else [each for each in found if issubclass(type(each), CONTAINERS)]


def values_in(value: Any) -> list[Any] | None:
    """Return a value with all that is in it, each object once; None if containers have too many items.

    Args:
        value: Value of any kind; one that is neither a container nor a tuple holds no others.

    Example:
        >>> values_in({"a": [1], "b": (2, "c")}), values_in(1)
        ([{'a': [1], 'b': (2, 'c')}, [1], (2, 'c'), 1, 2, 'c'], [1])
        >>> values_in(list(range(10_000)))
    """
    found: dict[int, Any] = {}
    waiting, items = [value], 0
    for each in waiting:  # which grows
        if id(each) in found:
            continue
        found[id(each)] = each
        if issubclass(type(each), HOLDERS):
            inner: Iterable[Any] = each.values() if isinstance(each, dict) else each
            items += len(each)
            if items >= LARGE:
                return None
            waiting += inner
    return list(found.values())


class ContainerStates:
    """Snapshot of the contents of containers, and of the containers in them.

    Objects in them are not covered, and neither is a container that has ten thousand items with those in it.

    Example:
        >>> outputs = {"losses": [1.0]}
        >>> states = ContainerStates()
        >>> states.add(outputs, "outputs")
        [{'losses': [1.0]}, [1.0], 1.0]
        >>> outputs["losses"].append(2.0)
        >>> outputs["seen"] = 3
        >>> states.restore()
        ['outputs']
        >>> outputs
        {'losses': [1.0]}
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Any, str]] = {}
        self._empty: list[tuple[Any, str]] = []
        """Containers without items, which most tables of modules are."""

    def add(self, value: Any, name: str) -> list[Any] | None:
        """Take a snapshot of a value, if it is a container or a tuple.

        Args:
            value: Value of any kind.
            name: Name of the value, which the containers in it have too.

        Returns:
            The value with all that is in it; None if it is not covered.
        """
        if not issubclass(type(value), HOLDERS):
            return [value]
        if not value:
            self._empty.append((value, name))
            return []
        found = values_in(value)
        for each in found or ():
            if issubclass(type(each), CONTAINERS) and id(each) not in self._before:
                self._before[id(each)] = (each, content_of(each), name)
        return found

    def restore(self) -> list[str]:
        """Restore the contents, and return the names of values that had others."""
        filled = [(value, name) for value, name in self._empty if value]
        changed = [each for each in self._before.values() if not has_content(each[0], each[1])]
        for value, _ in filled:
            value.clear()
        for value, content, _ in changed:
            fill(value, content)
        return sorted({each[-1] for each in (*filled, *changed)})
