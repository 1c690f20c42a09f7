"""The contents of lists, dicts, sets and deques, to be restored."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

CONTAINERS = (dict, list, set, deque)
"""Types of containers that are changed in place."""
_LARGE = 10_000
"""Number of items from which on a container is not copied, so that data in attributes costs nothing."""


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
        dict.update(container, content)  # since a Counter adds
    else:
        container.update(content) if isinstance(container, set) else container.extend(content)
    return container


def is_large(container: Any) -> bool:
    """Return whether a container has too many items to be copied before the work of each client.

    Args:
        container: List, dict, set or deque.
    """
    return len(container) >= _LARGE


class ContainerStates:
    """Snapshot of the contents of containers, and of the containers in them.

    Objects in them are not covered, and neither are containers of ten thousand items.

    Example:
        >>> outputs = {"losses": [1.0]}
        >>> states = ContainerStates()
        >>> states.add(outputs, "outputs")
        >>> outputs["losses"].append(2.0)
        >>> outputs["seen"] = 3
        >>> states.restore()
        ['outputs']
        >>> outputs
        {'losses': [1.0]}
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Any, str]] = {}

    def add(self, value: Any, name: str) -> None:
        """Take a snapshot of a value, if it is a container or a tuple.

        Args:
            value: Value of any kind.
            name: Name of the value, which the containers in it have too.
        """
        if isinstance(value, tuple):
            self._add_all(value, name)
        elif isinstance(value, CONTAINERS) and id(value) not in self._before and not is_large(value):
            content = dict(value) if isinstance(value, dict) else list(value)
            self._before[id(value)] = (value, content, name)
            self._add_all(content.values() if isinstance(content, dict) else content, name)

    def _add_all(self, items: Iterable[Any], name: str) -> None:
        for item in items:
            self.add(item, name)

    def restore(self) -> list[str]:
        """Restore the contents, and return the names of values that had others."""
        changed = [each for each in self._before.values() if not _is_same(each[0], each[1])]
        for value, content, _ in changed:
            fill(value, content)
        return sorted({name for *_, name in changed})


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a container has the same objects in the same order."""
    if len(now) != len(before):
        return False
    same = all(map(operator.is_, now, before))
    return same and (not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values())))
