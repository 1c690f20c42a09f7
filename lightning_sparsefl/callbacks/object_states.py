"""The state of objects, to be compared and restored: attributes, containers, tensors, arrays and random generators."""

from __future__ import annotations

import random
import sys
import weakref
from argparse import Namespace
from collections import UserDict, UserList
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from lightning_sparsefl.sparse.attributes import slots_of
from lightning_sparsefl.sparse.containers import CONTAINERS, LARGE, fill, has_content

_FOREIGN = ("torch", "lightning", "numpy", "lightning_sparsefl.federated")
"""Packages whose objects, such as modules, data and clients, are no part of the state of what holds them."""
_BASES = (object, Callback, Dataset, IterableDataset, Sampler)
"""Classes of these packages that users derive classes of objects with a state from."""
_PLAIN_OBJECTS = (Namespace, SimpleNamespace, UserDict, UserList)
"""Classes of Python's standard library whose objects have a state of the user."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES = (Tensor, np.ndarray, *GENERATORS)
LARGE_TENSOR = 2**20
"""Number of elements from which on a tensor in an attribute is taken for data."""
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
"""Types of values without a state."""


class Kept(NamedTuple):
    """An object as it was before."""

    value: Any
    before: Any
    """Copy of its content; None for a tensor, an array or a generator that is not copied."""
    name: str
    version: int = 0
    """Version of a tensor."""
    in_data: bool = False
    """Whether it is a container of ten thousand items, or in one, such as a data set in memory."""


class ObjectStates:
    """The state of objects, which can be compared and restored.

    Objects keep their identity, since others may hold them too, as an algorithm reads the result of a fit from its
    callbacks. Attributes are covered, and the containers, plain objects, tensors, arrays and random generators in them.
    Of what is in a container of ten thousand items, no tensors are, so that a data set in memory is not copied.

    Args:
        largest: Number of elements from which on a tensor is not copied, and not restored.
        in_data: Whether to keep containers and objects that are in containers of ten thousand items.

    Example:
        >>> held = {"sum": torch.zeros(2), "seen": [1]}
        >>> states = ObjectStates()
        >>> states.visit(held, "held")
        >>> held["sum"] += 1
        >>> held["seen"].append(2)
        >>> states.restore()
        >>> held
        {'sum': tensor([0., 0.]), 'seen': [1]}
    """

    def __init__(self, largest: float = float("inf"), in_data: bool = True) -> None:
        self._largest, self._in_data = largest, in_data
        self.kept: dict[int, Kept] = {}
        """By identity."""

    def visit(self, value: Any, name: str, in_data: bool = False) -> None:
        """Keep the state of a value, and of what is in it.

        Args:
            value: Value of any kind.
            name: Name of the value.
            in_data: Whether it is in a container of ten thousand items.
        """
        kind: Any = type(value)  # and not `isinstance`, which asks what a weak reference refers to
        if kind in PLAIN:
            return
        if issubclass(kind, _LEAVES):
            if id(value) not in self.kept:
                before = None if in_data else self._copy(value)
                self.kept[id(value)] = Kept(value, before, name, version_of(value), in_data)
        elif issubclass(kind, tuple):
            for item in value:
                self.visit(item, name, in_data)
        elif issubclass(kind, CONTAINERS):
            self._keep(value, value, name, in_data)
        elif self._has_state(value):
            self._keep(value, attributes_of(value), name, in_data)

    def _copy(self, value: Any) -> Any:
        """Return a copy of a tensor or an array, None for one that is too large, or the state of a generator."""
        if isinstance(value, Tensor):
            return None if value.is_inference() or value.numel() >= self._largest else value.detach().clone()
        if isinstance(value, np.ndarray):
            return None if value.size >= self._largest else value.copy()
        return state_of(value)

    def _has_state(self, value: Any) -> bool:
        kind: Any = type(value)
        if issubclass(kind, (type, *weakref.ProxyTypes)) or not (hasattr(value, "__dict__") or slots_of(kind)):
            return False
        return not _is_foreign(kind)

    def _keep(self, owner: Any, content: Any, name: str, in_data: bool) -> None:
        if id(owner) in self.kept:
            return
        in_data = in_data or len(content) >= LARGE
        self.kept[id(owner)] = Kept(owner, content.copy(), name, in_data=in_data)
        items: Iterable[Any] = content.values() if isinstance(content, dict) else content
        if (in_data and not self._in_data) or set(map(type, items)) <= PLAIN:  # a vocabulary, at the speed of C
            return
        if in_data or not isinstance(content, dict):
            for item in list(items):
                self.visit(item, name, in_data)
            return
        for key, item in list(content.items()):
            self.visit(item, f"{name}.{key}" if owner is not content else f"{name}[{key!r}]")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        for value, before, *_ in self.kept.values():
            if before is None:
                continue
            if isinstance(value, (Tensor, np.ndarray)):
                if not _is_equal(value, before):  # a tensor that repeats a row is not writable
                    value[...] = before
            elif isinstance(value, GENERATORS):
                set_state(value, before)
            elif not isinstance(value, CONTAINERS):
                _set_attributes(value, before)
            elif not has_content(value, before):
                fill(value, before)


def version_of(value: Any) -> int:
    """Return the number of writes into a tensor; 0 for other values, and for a tensor that does not count them.

    Args:
        value: Value of any kind.

    Example:
        >>> version_of(torch.zeros(2).add_(1)), version_of("text")
        (1, 0)
    """
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: its ``__dict__`` itself, or a copy with those that are in slots.

    Args:
        value: The object.

    Example:
        >>> attributes_of(SimpleNamespace(steps=3))
        {'steps': 3}
    """
    kind: Any = type(value)
    own, slots = getattr(value, "__dict__", {}), slots_of(kind)
    return {**own, **{name: getattr(value, name) for name in slots if hasattr(value, name)}} if slots else own


def _set_attributes(value: Any, before: Mapping[str, Any]) -> None:
    """Give an object the attributes that it had."""
    kind: Any = type(value)
    slots = slots_of(kind)
    for name in slots:  # also of a frozen dataclass
        if name in before:
            object.__setattr__(value, name, before[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if hasattr(value, "__dict__"):
        fill(vars(value), {name: own for name, own in before.items() if name not in slots})


def _is_equal(value: Any, before: Any) -> bool:
    """Return whether a tensor or an array has the numbers of another one."""
    return bool(torch.equal(value, before) if isinstance(value, Tensor) else np.array_equal(value, before))


def state_of(generator: Any) -> Any:
    """Return the state of a random generator.

    Args:
        generator: Generator of torch, Python or NumPy.

    Example:
        >>> generator = random.Random(0)
        >>> before = state_of(generator)
        >>> first = generator.random()
        >>> set_state(generator, before)
        >>> generator.random() == first
        True
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator.

    Args:
        generator: The generator.
        state: Result of :func:`state_of`.
    """
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _is_foreign(kind: type) -> bool:
    names = [base.__module__ for base in kind.__mro__ if base not in _BASES]
    if kind not in _PLAIN_OBJECTS and names[0].partition(".")[0] in sys.stdlib_module_names:
        return True  # such as loggers, functions and modules of Python
    return any(name == package or name.startswith(f"{package}.") for name in names for package in _FOREIGN)
