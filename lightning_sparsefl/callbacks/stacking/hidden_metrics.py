"""Metric objects of a module whose states are those of each client of a stack, and not in the objects."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

METHODS = ("forward", "update", "compute", "reset")
"""Methods by which a metric is used."""


class SharedCount:
    """Number of updates that clients share while they use a metric object, which notes when it is read.

    Counting on, and asking whether there has been an update where all clients have the same answer, is not reading.

    Args:
        value: Number of updates.
        note: Function that is called when the number is read.
        is_same: Whether all clients have had an update, or none has.
        asked: Function that is called when somebody asks whether there has been an update.

    Example:
        >>> reads = []
        >>> count = SharedCount(3, lambda: reads.append(1), True) + 1
        >>> count > 0, count.value, len(reads)
        (True, 4, 0)
        >>> 8.0 / count, torch.ones(2) / count, len(reads)
        (2.0, tensor([0.2500, 0.2500]), 2)
    """

    def __init__(
        self, value: int, note: Callable[[], object], is_same: bool, asked: Callable[[], object] = lambda: None
    ) -> None:
        self.value, self._note, self._is_same, self._asked = value, note, is_same, asked

    def read(self) -> int:
        """Return the number, and note that it is read."""
        self._note()
        return self.value

    def __add__(self, number: int) -> SharedCount:
        """Return the number after further updates."""
        return SharedCount(self.value + number, self._note, self._is_same, self._asked)

    def __gt__(self, number: Any) -> bool:
        """Return whether the number is larger."""
        if self._is_same and type(number) is int and number == 0:
            self._asked()
            return self.value > 0
        return bool(self.read() > _plain(number))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the number."""
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, SharedCount) else value


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda count, *others: function(count.read(), *others)


def _of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda count, other: function(count.read(), _plain(other))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda count, other: function(_plain(other), count.read())


_UNARY: tuple[Callable[..., Any], ...] = (int, float, bool, str, repr, hash, format, operator.index, operator.neg)
_COMPARISONS: tuple[Callable[..., Any], ...] = (operator.lt, operator.le, operator.ge, operator.eq, operator.ne)
_ARITHMETIC: tuple[Callable[..., Any], ...] = (
    *(operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
)
for _function in _UNARY:
    setattr(SharedCount, f"__{_function.__name__}__", _of_one(_function))
for _function in (*_COMPARISONS, *_ARITHMETIC):
    setattr(SharedCount, f"__{_function.__name__}__", _of_two(_function))
for _function in (operator.add, *_ARITHMETIC):
    setattr(SharedCount, f"__r{_function.__name__}__", _reflected(_function))


class HiddenState(Tensor):
    """State that cannot be read or written; a tensor, since a metric's hash is that of its states."""

    refuse: Callable[..., object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise what `refuse` raises."""
        hidden_ones = (each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        return next(hidden_ones).refuse()


def hidden_state(refuse: Callable[..., object]) -> HiddenState:
    """Return what stands in the place of a state, also of a list.

    Args:
        refuse: Function that raises.
    """
    state = torch.empty(0).as_subclass(HiddenState)
    state.refuse = refuse
    return state


def hidden(metric: Metric, refuse: Callable[..., object]) -> dict[str, Any]:
    """Return attributes of a metric object by which it cannot be used.

    Args:
        metric: Metric object.
        refuse: Function that raises, in place of the methods and for the states.
    """
    states = {name: hidden_state(refuse) for name in metric._defaults if name in vars(metric)}
    return {**dict.fromkeys(METHODS, refuse), **states, "_update_count": SharedCount(0, refuse, False)}
