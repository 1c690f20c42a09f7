"""What callbacks and a module keep in attributes, as it was before a stack that failed or that changed it."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset, IterableDataset, Sampler
from torchmetrics import Metric, MetricCollection

from lightning_sparsefl.federated.local.isolation import OF_LIGHTNING, Settings, is_restored
from lightning_sparsefl.federated.local.metric_attributes import own_attributes
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import ChangesAttribute, NotStackable
from lightning_sparsefl.sparse.attributes import slots_of
from lightning_sparsefl.sparse.containers import CONTAINERS, containers_in, content_of, fill, has_content

_FOREIGN = ("torch", "lightning", "numpy", "lightning_sparsefl.federated")
"""Packages whose objects, such as modules, data and clients, are no part of the state of what holds them."""
_BASES = (object, Callback, Dataset, IterableDataset, Sampler)
"""Classes of these packages that users derive classes of objects with a state from."""
_PLAIN_OBJECTS = (Namespace, SimpleNamespace, UserDict, UserList)
"""Classes of Python's standard library whose objects have a state of the user."""
_OF_A_FIT = OF_LIGHTNING | {"trainer", "log", "log_dict", "configure_optimizers"}
"""Attributes of modules that torch, Lightning and a fit set."""
_LARGE = 2**20
"""Number of elements from which on a tensor of a module is not copied, so that data in attributes costs nothing."""
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES = (Tensor, np.ndarray, *_GENERATORS)
_GLOBAL = {
    "random": random.getstate.__self__,  # type: ignore[attr-defined]
    "numpy.random": np.random.get_state.__self__,  # type: ignore[attr-defined]
}
"""Global random generators of Python and NumPy, which a stack seeds once for all of its clients."""


class _Change(NamedTuple):
    """Something that differs from the state before."""

    clause: str
    """What a step does to cause it."""
    name: str = ""
    """Name of the attribute, if it has another value, or another content of its containers."""


class States:
    """The state of objects, which can be compared and restored.

    Objects keep their identity, since others may hold them too, as an algorithm reads the result of a fit from its
    callbacks. Attributes are covered, and the containers, plain objects, tensors, arrays and random generators in them.
    """

    largest: float = float("inf")
    """Number of elements from which on a tensor is not copied, and not restored."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Any, str]] = {}
        """Object, copy of its content, and its name, by identity."""
        self._versions: dict[int, int] = {}

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, _LEAVES):
            if id(value) not in self._before:
                self._before[id(value)] = (value, self._copy(value), name)
            if isinstance(value, Tensor):
                self._versions.setdefault(id(value), 0 if value.is_inference() else value._version)
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item, name)
        elif isinstance(value, CONTAINERS):
            self._note(value, value, name)
        elif self._has_state(value):
            self._note(value, _attributes(value), name)

    def _copy(self, value: Any) -> Any:
        """Return a copy of a tensor or an array, None for one that is too large, or the state of a generator."""
        if isinstance(value, Tensor):
            return None if value.is_inference() or value.numel() >= self.largest else value.detach().clone()
        if isinstance(value, np.ndarray):
            return None if value.size >= self.largest else value.copy()
        return _state_of(value)

    def _has_state(self, value: Any) -> bool:
        kind: Any = type(value)
        if isinstance(value, type) or not (hasattr(value, "__dict__") or slots_of(kind)):
            return False
        return not _is_foreign(kind)

    def _note(self, owner: Any, content: Any, name: str) -> None:
        if id(owner) in self._before:
            return
        self._before[id(owner)] = (owner, content.copy(), name)
        if isinstance(content, dict):
            for key, item in list(content.items()):
                self._visit(item, f"{name}.{key}" if owner is not content else f"{name}[{key!r}]")
        else:
            for item in list(content):
                self._visit(item, name)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        for value, before, _ in self._before.values():
            if isinstance(value, (Tensor, np.ndarray)):
                if before is not None and not _is_equal(value, before):  # a tensor that repeats a row is not writable
                    value[...] = before
            elif isinstance(value, _GENERATORS):
                _set_state(value, before)
            elif isinstance(value, CONTAINERS):
                if not has_content(value, content_of(before)):
                    fill(value, before)
            else:
                _set_attributes(value, before)


class GlobalDraws:
    """Draws from the global random generators of Python and NumPy since this object was made.

    Example:
        >>> draws = GlobalDraws()
        >>> before = random.getstate()
        >>> draws.source(), random.random() < 1, draws.source()
        (None, True, 'random')
        >>> random.setstate(before)
    """

    def __init__(self) -> None:
        self._before = {name: _state_of(generator) for name, generator in _GLOBAL.items()}

    def source(self) -> str | None:
        """Return the name of a generator that numbers were drawn from, or None."""
        now = {name: _state_of(generator) for name, generator in _GLOBAL.items()}
        return next((name for name in now if not _equal_states(now[name], self._before[name])), None)


class CallbackStates(States):
    """The state of callbacks before a fit.

    Args:
        callbacks: The callbacks.

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
        super().__init__()
        for callback in callbacks:
            self._note(callback, vars(callback), type(callback).__name__)


class ModuleStates(States):
    """What a module keeps beside its parameters and submodules: attributes of any kind, and its buffers.

    Clients of a stack share it, so that a step which changes it has no meaning for several clients at once. The states
    of metric objects that are submodules are not covered, and neither are Lightning's own attributes.

    Args:
        module: Module before a fit or an evaluation, which holds its own tensors.
        others: Further objects by name, such as transforms of the data.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> module = LightningModule()
        >>> module.sums = {"loss": 0.0}
        >>> states = ModuleStates(module)
        >>> module.sums["loss"] = 1.5
        >>> states.changed()
        'changes `self.sums`'
        >>> states.restore()
        >>> module.sums, states.changed()
        ({'loss': 0.0}, None)
    """

    largest = _LARGE

    def __init__(self, module: nn.Module, others: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self.iterators: list[str] = []
        """Names of iterators, such as generators, whose state can neither be compared nor restored."""
        self._members = {id(child) for child in module.modules()}
        self._owners: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._modules = list(module.named_modules())
        for path, child in self._modules:
            name = f"self.{path}" if path else "self"
            own = _own(child)
            buffers = _buffers_of(child)
            self._owners.append((name, child, own, buffers))
            for key, value in (*own.items(), *buffers.items()):
                self._visit(value, f"{name}.{key}")
        for name, value in others.items():
            self._visit(value, name)
        self._draws = GlobalDraws()

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, Iterator) and not self._has_state(value):
            self.iterators.append(name)
        super()._visit(value, name)

    def _has_state(self, value: Any) -> bool:
        if isinstance(value, nn.Module):  # in a container, such as a metric object in a dict
            return id(value) not in self._members
        return super()._has_state(value)

    def values(self) -> list[tuple[str, Any]]:
        """Return the numbers, and copies of tensors and arrays that are not parameters, each with its name."""
        numbers = [
            (f"{name}.{key}", value)
            for name, _, own, _ in self._owners
            for key, value in own.items()
            if isinstance(value, (int, float))
        ]
        return numbers + [
            (name, before)
            for value, before, name in self._before.values()
            if isinstance(value, (Tensor, np.ndarray)) and not isinstance(value, nn.Parameter)
        ]

    def changed(self) -> str | None:
        """Return what differs from the state before, as a clause of what a step does, or None."""
        return next((change.clause for change in self._changes()), None)

    def _changes(self) -> Iterator[_Change]:
        """Iterate over the differences from the state before."""
        for name, child, own, buffers in self._owners:
            now = _own(child) | _buffers_of(child)
            for key in sorted({*now, *own, *buffers}):
                if not _same(now.get(key), buffers.get(key, own.get(key))):
                    if key in buffers:
                        yield _Change(f"assigns the buffer `{name}.{key}` instead of writing into it")
                    else:
                        yield _Change(_clause(f"{name}.{key}", now.get(key)), f"{name}.{key}")
        written = {id(buffer) for *_, own in self._owners for buffer in own.values()}
        for value, before, name in self._before.values():
            if self._is_same(value, before):
                continue
            if id(value) in written:
                yield _Change(f"writes into the buffer `{name}`")
            else:
                holder = name.partition("[")[0] if isinstance(value, CONTAINERS) else ""
                yield _Change(_clause(name, value, before), holder)

    def require_same(self) -> None:
        """Raise :class:`NotStackable` if anything has changed.

        Raises:
            ChangesAttribute: If it is an attribute of which each client can have a value of its own.
        """
        found = [(change.clause, self._attribute(change.name)) for change in self._changes()]
        clause = next((clause for clause, attribute in found if attribute is None), None)
        if clause is not None:
            raise NotStackable(f"{clause}, which all clients share")
        attributes = frozenset(attribute for _, attribute in found if attribute is not None)
        if attributes:
            raise ChangesAttribute(f"{found[0][0]}, which all clients share", attributes)

    def require_unchanged(self) -> None:
        """Do as :meth:`require_same`, and raise if random numbers of Python or NumPy were drawn, which takes longer."""
        self.require_same()
        drawn_from = self._draws.source()
        if drawn_from is not None:
            raise NotStackable(f"draws random numbers from `{drawn_from}`, which all clients share")

    def _attribute(self, name: str) -> tuple[str, str] | None:
        """Return path and name of an attribute that a client alone does not leave to the next client, or None."""
        for (path, child), (owner, *_) in zip(self._modules, self._owners, strict=True):
            key = name.removeprefix(f"{owner}.")
            if key != name and "." not in key and not isinstance(child, (Metric, MetricCollection)):
                is_small = containers_in(vars(child).get(key)) is not None
                return (path, key) if is_small and is_restored(child, key) else None
        return None

    def _is_same(self, value: Any, before: Any) -> bool:
        if isinstance(value, Tensor):
            return value.is_inference() or value._version == self._versions[id(value)]
        if isinstance(value, np.ndarray):
            return before is None or bool(np.array_equal(value, before, equal_nan=value.dtype.kind in "fc"))
        if isinstance(value, _GENERATORS):
            return _equal_states(_state_of(value), before)
        content = value if isinstance(value, CONTAINERS) else _attributes(value)
        plain = next((kind for kind in (dict, set) if isinstance(content, kind)), list)
        return _same(plain(content), plain(before))  # a subclass may copy itself as the class

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        for _, child, own, buffers in self._owners:
            for key in _own(child).keys() - own.keys():
                del vars(child)[key]
            vars(child).update(own)
            child._buffers.update(buffers)
        super().restore()


def require_same_settings(settings: Settings) -> None:
    """Raise :class:`NotStackable` if a step has set an attribute of objects of Lightning and torch.

    Args:
        settings: Settings before the step.
    """
    changed = settings.changed()
    if changed is not None:
        raise NotStackable(f"changes `{changed}`, which all clients share")


@contextmanager
def objects_kept(objects: Iterable[Any]) -> Iterator[None]:
    """Undo the changes that are made to the attributes of objects within the context.

    Args:
        objects: The objects, such as transforms of the data.
    """
    states = States()
    for each in objects:
        states._visit(each, "")
    try:
        yield
    finally:
        states.restore()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undo the changes that are made to a module's attributes within the context.

    Args:
        module: The module.
    """
    states = ModuleStates(module)
    try:
        yield
    finally:
        states.restore()


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: its ``__dict__`` itself, or a copy with those that are in slots."""
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


def _clause(name: str, now: Any, before: Any = None) -> str:
    """Return what a step has done to something that has changed, as a clause.

    Args:
        name: Name of what has changed.
        now: Value that it has.
        before: Content of a container or a tensor before the step; None for an attribute.
    """
    if isinstance(now, Tensor):
        return f"keeps a tensor in `{name}`" if before is None else f"writes into the tensor `{name}`"
    if isinstance(now, (int, float)):
        return f"changes the number `{name}`"
    if isinstance(now, (list, dict, set)) and before is not None and len(now) != len(before):
        return f"changes the length of `{name}`"
    return f"changes `{name}`"


def _buffers_of(child: nn.Module) -> dict[str, Any]:
    """Return a module's buffers, but for the number of batches of a batch norm, which its training does not read."""
    counts = {"num_batches_tracked"} if isinstance(child, _BatchNorm) else ()
    return {key: buffer for key, buffer in child._buffers.items() if key not in counts}


def _own(child: nn.Module) -> dict[str, Any]:
    """Return a module's attributes but for those that every module has; Lightning makes empty `_hparams` when asked."""
    if isinstance(child, Metric):
        return own_attributes(child)
    found = {key: value for key, value in vars(child).items() if key not in _OF_A_FIT}
    return found if found.get("_hparams", True) else {key: value for key, value in found.items() if key != "_hparams"}


def _state_of(generator: Any) -> Any:
    """Return the state of a random generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def differing_value(ours: Sequence[tuple[str, Any]], theirs: Sequence[tuple[str, Any]]) -> str | None:
    """Return the name of the first of two modules' values that differ, or None; see :meth:`ModuleStates.values`.

    Args:
        ours: Values with their names.
        theirs: Values of the other module.
    """
    for one, other in zip_longest(ours, theirs, fillvalue=("", None)):
        if one[0] != other[0] or not _same(one[1], other[1]):
            return one[0] or other[0]
    return None


def _equal_states(now: Any, before: Any) -> bool:
    """Return whether two states of a random generator are equal; those of NumPy are dictionaries with arrays."""
    if isinstance(now, dict):
        return all(_equal_states(value, before[key]) for key, value in now.items())
    if isinstance(now, Tensor):
        return bool(torch.equal(now, before))
    return bool(np.array_equal(now, before)) if isinstance(now, np.ndarray) else bool(now == before)


def _same(now: Any, before: Any) -> bool:
    """Return whether two values are the same object, or have equal content."""
    if now is before:
        return True
    if type(now) is not type(before) or functorch.is_batched(now):
        return False
    if isinstance(now, Tensor):
        return now.shape == before.shape and now.dtype == before.dtype and bool(torch.equal(now, before))
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, before))
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(before) and all(map(_same, now, before))
    return isinstance(now, (int, float, complex, str, bytes, set, frozenset, torch.dtype)) and bool(now == before)


def _is_foreign(kind: type) -> bool:
    names = [base.__module__ for base in kind.__mro__ if base not in _BASES]
    if kind not in _PLAIN_OBJECTS and names[0].partition(".")[0] in sys.stdlib_module_names:
        return True  # such as loggers, functions and modules of Python
    return any(name == package or name.startswith(f"{package}.") for name in names for package in _FOREIGN)
