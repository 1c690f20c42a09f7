"""Callbacks as they were before a stack that failed, whose clients are then fitted again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

_FOREIGN = ("torch", "lightning", "numpy", "lightning_sparsefl.federated")
"""Packages whose objects, such as modules, data and clients, are no part of a callback's state."""


class CallbackStates:
    """The state of callbacks, which can be restored.

    Objects keep their identity, since an algorithm may hold them too and read the result of a fit from them.

    Args:
        callbacks: Callbacks before a fit. Their attributes, the dicts, lists, sets and plain objects in them, and
            tensors and generators are covered.

    Example:
        >>> callback = Callback()
        >>> callback.sums = {"weight": torch.zeros(2)}
        >>> states = CallbackStates([callback])
        >>> callback.sums["weight"] += 1
        >>> callback.sums["bias"], callback.steps = torch.ones(1), 3
        >>> states.restore()
        >>> vars(callback)
        {'sums': {'weight': tensor([0., 0.])}}
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}
        for callback in callbacks:
            self._note(callback, vars(callback))

    def _visit(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self._before:
                self._before[id(value)] = (value, value.detach().clone())
        elif isinstance(value, torch.Generator):
            if id(value) not in self._before:
                self._before[id(value)] = (value, value.get_state())
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item)
        elif isinstance(value, (dict, list, set)):
            self._note(value, value)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not _is_foreign(type(value)):
            self._note(value, vars(value))

    def _note(self, owner: Any, content: Any) -> None:
        if id(owner) not in self._before:
            self._before[id(owner)] = (owner, content.copy())
            for item in list(content.values() if isinstance(content, dict) else content):
                self._visit(item)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        for value, before in self._before.values():
            if isinstance(value, Tensor):
                value.copy_(before)
            elif isinstance(value, torch.Generator):
                value.set_state(before)
            elif isinstance(value, list):
                value[:] = before
            else:
                content = value if isinstance(value, (dict, set)) else vars(value)
                content.clear()
                content.update(before)


def _is_foreign(kind: type) -> bool:
    names = [base.__module__ for base in kind.__mro__ if base is not object]
    return any(name == package or name.startswith(f"{package}.") for name in names for package in _FOREIGN)
