"""The state of objects, to be compared and restored: attributes, containers, tensors, arrays and random generators."""

from __future__ import annotations

import random
import sys
import weakref
from argparse import Namespace
from collections import UserDict, UserList
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset, Sampler

from lightning_sparsefl.sparse.attributes import slots_of
from lightning_sparsefl.sparse.containers import CONTAINERS, LARGE, content_of, fill, has_content

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
    attributes: Mapping[str, Any] = MappingProxyType({})
    """Copy of the attributes of a container whose class is one of the user's."""


class ObjectStates:
    """The state of objects, which can be compared and restored.

    Objects keep their identity, since others may hold them too, as an algorithm reads the result of a fit from its
    callbacks. Attributes are covered, and the containers, plain objects, tensors, arrays and random generators in them.

    Args:
        largest: Number of elements from which on a tensor is not copied, and not restored.
        copies_data: Whether to copy the tensors in containers of ten thousand items, as before a single trial.
        most: Number of items, with those in inner containers, from which on a value is data, of which only the
            outermost container is kept; an item that is no number or string counts ten times. None = no value is.
        members: Submodules of the model, which are no part of the state of what holds them.

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

    def __init__(
        self,
        largest: float = float("inf"),
        copies_data: bool = False,
        most: int | None = None,
        members: Iterable[nn.Module] = (),
    ) -> None:
        self._largest, self._copies_data, self._most = largest, copies_data, most
        self._members = {id(module) for module in members}
        self.kept: dict[int, Kept] = {}
        """By identity."""

    def visit(self, value: Any, name: str) -> None:
        """Keep the state of a value, and of what is in it.

        Args:
            value: Value of any kind.
            name: Name of the value.
        """
        found = dict[int, tuple[Any, str, bool]]()
        size, elements, waiting = 0, 0, [(value, name, False)]
        for each, own_name, in_data in waiting:  # which grows
            known = id(each) in self.kept or id(each) in found
            content = None if known else self._content(each)
            if content is None:
                continue
            elements += _elements(each)
            items = content.values() if isinstance(content, dict) else content
            has_plain_items = set(map(type, items)) <= PLAIN  # as a vocabulary; at the speed of C
            size += len(items) if has_plain_items else len(items) * _ITEMS_OF_VALUE
            if not isinstance(each, tuple):
                in_data = in_data or (isinstance(each, CONTAINERS) and len(content) >= LARGE)
                found[id(each)] = (each, own_name, in_data)
            if self._most is not None and (size >= self._most or elements >= self._largest):
                found = {key: kept for key, kept in found.items() if key == id(value)}
                break
            if not has_plain_items:
                waiting += [(*item, in_data) for item in _items(content, own_name, of_object=content is not each)]
            waiting += [(*item, in_data) for item in _items(beside(each), own_name, of_object=True)]
        for each, own_name, in_data in found.values():
            self.keep(each, own_name, in_data)

    def _content(self, value: Any) -> Any:
        """Return a container itself, the attributes of an object, or nothing for a leaf; None without a state."""
        kind: Any = type(value)  # and not `isinstance`, which asks what a weak reference refers to
        if kind in PLAIN:
            return None
        if issubclass(kind, _LEAVES):
            return ()
        if issubclass(kind, (tuple, *CONTAINERS)):
            return value
        return attributes_of(value) if self._has_state(value) else None

    def keep(self, value: Any, name: str, in_data: bool = False) -> None:
        """Keep the state of an object, but not that of what is in it.

        Args:
            value: Tensor, array, generator, container or object with attributes.
            name: Name of the value.
            in_data: Whether it is a container of ten thousand items, or in one.
        """
        if not isinstance(value, _LEAVES):
            before = content_of(value if isinstance(value, CONTAINERS) else attributes_of(value))
        else:
            before = None if in_data and not self._copies_data else self._copy(value)
        self.kept[id(value)] = Kept(value, before, name, version_of(value), in_data, dict(beside(value)))

    def _copy(self, value: Any) -> Any:
        """Return a copy of a tensor or an array, or the state of a generator; None for what cannot be restored."""
        if isinstance(value, Tensor):
            return value.detach().clone() if is_plain(value) and value.numel() < self._largest else None
        if isinstance(value, np.ndarray):
            return value.copy() if value.flags.writeable and value.size < self._largest else None
        return None if isinstance(value, random.SystemRandom) else state_of(value)

    def _has_state(self, value: Any) -> bool:
        kind: Any = type(value)
        if issubclass(kind, nn.Module):  # in a container, such as a metric object in a dict
            return id(value) not in self._members
        if issubclass(kind, (type, *weakref.ProxyTypes)) or not (hasattr(value, "__dict__") or slots_of(kind)):
            return False
        return not _is_foreign(kind)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        for kept in self.kept.values():
            value, before = kept.value, kept.before
            if before is None:
                continue
            if not has_content(beside(value), kept.attributes):
                _set_attributes(value, kept.attributes)
            if isinstance(value, Tensor):
                _restore_tensor(value, before)
            elif isinstance(value, np.ndarray):
                if value.shape == before.shape:
                    value[...] = before
            elif isinstance(value, GENERATORS):
                set_state(value, before)
            elif not isinstance(value, CONTAINERS):
                _set_attributes(value, before)
            elif not has_content(value, before):
                fill(value, before)


_ITEMS_OF_VALUE = 10
"""Number of plain items of a container that count as one that may have a state, such as a tensor."""


def beside(value: Any) -> Mapping[str, Any]:
    """Return the attributes of a container whose class is one of the user's, beside its items; else nothing.

    Args:
        value: Value of any kind.

    Example:
        >>> class Sums(dict):
        ...     steps = 0
        >>> sums = Sums(loss=1.5)
        >>> sums.steps += 1
        >>> beside(sums), beside({"loss": 1.5})
        ({'steps': 1}, {})
    """
    kind = type(value)
    if not issubclass(kind, CONTAINERS) or kind.__module__ in ("builtins", "collections"):
        return {}
    return attributes_of(value)


def _items(content: Any, name: str, of_object: bool = False) -> list[tuple[Any, str]]:
    """Return what is in a container or among the attributes of an object, with names."""
    if not isinstance(content, dict):
        return [(item, name) for item in content]
    if len(content) >= LARGE:
        return [(item, name) for item in content.values()]
    return [(item, f"{name}.{key}" if of_object else f"{name}[{key!r}]") for key, item in content.items()]


def _elements(value: Any) -> int:
    """Return the number of elements of a tensor or an array that can be copied."""
    if isinstance(value, Tensor):
        return value.numel() if is_plain(value) else 0
    return value.size if isinstance(value, np.ndarray) else 0


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers in a memory of its own that can be compared and written.

    Args:
        tensor: The tensor.

    Example:
        >>> is_plain(torch.zeros(2)), is_plain(torch.zeros(1).expand(2))
        (True, False)
    """
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (repeats or tensor.is_mkldnn or tensor.is_quantized)


def has_numbers(value: Tensor, before: Tensor) -> bool:
    """Return whether a tensor has the shape and the numbers of another one; those that are not numbers are equal.

    Args:
        value: The tensor.
        before: The other one.

    Example:
        >>> has_numbers(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    if value.shape != before.shape:
        return False
    return bool(torch.equal(value, before) or torch.allclose(value, before, 0, 0, equal_nan=True))


def _restore_tensor(value: Tensor, before: Tensor) -> None:
    """Give a tensor the numbers that it had, unless it has them, since a write would invalidate graphs."""
    # such as a state that was reset at the end of an evaluation; `inference_mode(False)` would enable gradients
    with torch.inference_mode() if value.is_inference() else nullcontext():
        if value.shape != before.shape:
            value.data = before
        elif not has_numbers(value, before):
            value.copy_(before)


def version_of(value: Any) -> int:
    """Return the number of writes into a tensor; 0 for other values, and for a tensor that does not count them.

    Args:
        value: Value of any kind.

    Example:
        >>> version_of(torch.zeros(2).add_(1)), version_of("text")
        (1, 0)
    """
    counts = isinstance(value, Tensor) and not is_lazy(value) and not value.is_inference()
    return value._version if counts else 0


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
