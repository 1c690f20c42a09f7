"""What callbacks and a module keep in attributes, as it was before a stack that failed or that changed it."""

from __future__ import annotations

import operator
import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric, MetricCollection

from lightning_sparsefl.callbacks.object_states import (
    GENERATORS,
    LARGE_TENSOR,
    Kept,
    ObjectStates,
    attributes_of,
    beside,
    has_numbers,
    state_of,
    version_of,
)
from lightning_sparsefl.federated.local.isolation import OF_LIGHTNING, Settings, is_restored
from lightning_sparsefl.federated.local.metric_attributes import own_attributes
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import ChangesAttribute, NotStackable
from lightning_sparsefl.sparse.containers import CONTAINERS, containers_in, has_content

_OF_A_FIT = OF_LIGHTNING | {"trainer", "log", "log_dict", "configure_optimizers"}
"""Attributes of modules that torch, Lightning and a fit set."""
_LIBRARIES = frozenset(("builtins", "lightning", "lightning_sparsefl", "torch", "torchmetrics", "torchvision"))
"""Packages whose classes have no attributes that steps set."""
_LARGEST_TRIED = 2**28
"""Number of elements from which on a tensor is not copied before a trial, so that there is memory for the copy."""
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
        self._before = {name: state_of(generator) for name, generator in _GLOBAL.items()}

    def source(self) -> str | None:
        """Return the name of a generator that numbers were drawn from, or None."""
        now = {name: state_of(generator) for name, generator in _GLOBAL.items()}
        return next((name for name in now if not _equal_states(now[name], self._before[name])), None)


class CallbackStates(ObjectStates):
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
            self.keep(callback, type(callback).__name__)
            for key, value in vars(callback).items():
                self.visit(value, f"{type(callback).__name__}.{key}")


class ModuleStates(ObjectStates):
    """What a module keeps beside its parameters and submodules: attributes of any kind, also of its class, and buffers.

    Clients of a stack share it, so that a step which changes it has no meaning for several clients at once. The states
    of metric objects that are submodules are not covered, and neither are Lightning's own attributes.

    Args:
        module: Module before a fit or an evaluation, which holds its own tensors.
        others: Further objects by name, such as transforms of the data.
        largest: Number of elements from which on a tensor is not copied, and not restored.
        copies_data: Whether to copy the tensors in containers of ten thousand items.

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

    def __init__(
        self,
        module: nn.Module,
        others: Mapping[str, Any] = MappingProxyType({}),
        largest: float = LARGE_TENSOR,
        copies_data: bool = False,
    ) -> None:
        super().__init__(largest, copies_data, members=module.modules())
        self._visited = ""
        self.iterators: list[str] = []
        """Names of iterators, such as generators, whose state can neither be compared nor restored."""
        self._owners: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = []
        # those of a traced or scripted module cannot be assigned
        modules = module.named_modules()
        self._modules = [(path, child) for path, child in modules if not isinstance(child, torch.jit.ScriptModule)]
        for path, child in self._modules:
            name = f"self.{path}" if path else "self"
            own = _own(child)
            buffers = _buffers_of(child)
            self._owners.append((name, child, own, buffers))
            for key, value in (*own.items(), *buffers.items()):
                self.visit(value, f"{name}.{key}")
        self._classes = [(kind, dict(vars(kind))) for kind in _classes_of_users(child for _, child in self._modules)]
        for kind, before in self._classes:
            for key, value in _data_of_class(before).items():
                self.visit(value, f"{kind.__name__}.{key}")
        for name, value in others.items():
            self.visit(value, name)
        self._draws = GlobalDraws()

    def visit(self, value: Any, name: str) -> None:
        """Keep the state of a value; see :meth:`.ObjectStates.visit`."""
        self._visited = name
        super().visit(value, name)

    def _has_state(self, value: Any) -> bool:
        kind, has_state = type(value), super()._has_state(value)
        if not has_state and issubclass(kind, Iterator) and kind not in weakref.ProxyTypes:
            self.iterators.append(self._visited)
        return has_state

    def values(self) -> list[tuple[str, Any]]:
        """Return the numbers, and copies of tensors and arrays that are not parameters, each with its name."""
        numbers = [
            (f"{name}.{key}", value)
            for name, _, own, _ in self._owners
            for key, value in own.items()
            if issubclass(type(value), (int, float))
        ]
        return numbers + [
            (name, before)
            for value, before, name, *_ in self.kept.values()
            if isinstance(value, (Tensor, np.ndarray)) and not isinstance(value, nn.Parameter)
        ]

    def changed(self) -> str | None:
        """Return what differs from the state before, as a clause of what a step does, or None."""
        return next((change.clause for change in self._changes()), None)

    def _changes(self, in_data: bool = True) -> Iterator[_Change]:
        """Iterate over the differences from the state before, also those in a data set in memory, which take longer."""
        for name, child, own, buffers in self._owners:
            now = _own(child) | _buffers_of(child)
            for key in sorted({*now, *own, *buffers}):
                if not _same(now.get(key), buffers.get(key, own.get(key))):
                    if key in buffers:
                        yield _Change(f"assigns the buffer `{name}.{key}` instead of writing into it")
                    else:
                        yield _Change(_clause(f"{name}.{key}", now.get(key)), f"{name}.{key}")
        yield from self._changes_of_classes()
        written = {id(buffer) for *_, own in self._owners for buffer in own.values()}
        for kept in self.kept.values():
            value, before, name, *_ = kept
            if self._is_same(kept, in_data):
                continue
            if id(value) in written:
                yield _Change(f"writes into the buffer `{name}`")
            else:
                holder = name.partition("[")[0] if isinstance(value, CONTAINERS) else ""
                yield _Change(_clause(name, value, before), holder)

    def _changes_of_classes(self) -> Iterator[_Change]:
        for kind, before in self._classes:
            if len(vars(kind)) == len(before) and all(map(operator.is_, vars(kind).values(), before.values())):
                continue  # as after almost every batch
            now, own = _data_of_class(vars(kind)), _data_of_class(before)
            for key in sorted({*now, *own}):
                if not _same(now.get(key), own.get(key)):
                    yield _Change(f"sets the attribute `{key}` of the class `{kind.__name__}`")

    def require_same(self, in_data: bool = False) -> None:
        """Raise :class:`NotStackable` if anything has changed.

        Args:
            in_data: Whether to look into containers of ten thousand items as well.

        Raises:
            ChangesAttribute: If it is an attribute of which each client can have a value of its own.
        """
        found = [(change.clause, self._attribute(change.name)) for change in self._changes(in_data)]
        clause = next((clause for clause, attribute in found if attribute is None), None)
        if clause is not None:
            raise NotStackable(f"{clause}, which all clients share")
        attributes = frozenset(attribute for _, attribute in found if attribute is not None)
        if attributes:
            raise ChangesAttribute(f"{found[0][0]}, which all clients share", attributes)

    def require_unchanged(self) -> None:
        """Do as :meth:`require_same`, and raise if random numbers of Python or NumPy were drawn, which takes longer."""
        self.require_same(in_data=True)
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

    def _is_same(self, kept: Kept, in_data: bool) -> bool:
        value, before, is_container = kept.value, kept.before, isinstance(kept.value, CONTAINERS)
        if kept.in_data and not in_data:
            return not is_container or len(value) == len(before)
        if isinstance(value, Tensor):
            if version_of(value) != kept.version:
                return False
            compares = before is not None and (in_data or value.is_inference())  # a write by `data` has no version
            return not compares or has_numbers(value, before)
        if isinstance(value, np.ndarray):
            return before is None or bool(np.array_equal(value, before, equal_nan=value.dtype.kind in "fc"))
        if isinstance(value, GENERATORS):
            return before is None or _equal_states(state_of(value), before)
        if is_container and not has_content(beside(value), kept.attributes):
            return False
        if is_container and has_content(value, before):
            return True
        content = value if is_container else attributes_of(value)
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
        for kind, before in self._classes:
            now, own = _data_of_class(vars(kind)), _data_of_class(before)
            for key in now.keys() - own.keys():
                delattr(kind, key)
            for key, value in own.items():
                if now.get(key) is not value:
                    setattr(kind, key, value)
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
    states = ObjectStates()
    for each in objects:
        states.visit(each, "")
    try:
        yield
    finally:
        states.restore()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undo the changes that a trial makes to a module's attributes within the context.

    Args:
        module: The module.
    """
    states = ModuleStates(module, largest=_LARGEST_TRIED, copies_data=True)
    try:
        yield
    finally:
        states.restore()


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


def _classes_of_users(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules, with their bases, that are not part of a library."""
    bases = dict.fromkeys(base for child in modules for base in type(child).__mro__)
    return [base for base in bases if base.__module__.partition(".")[0] not in _LIBRARIES]


def _data_of_class(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a class that are neither its methods nor Python's own."""
    return {
        key: value
        for key, value in attributes.items()
        if not (key.startswith(("__", "_abc_")) or callable(value) or hasattr(type(value), "__get__"))
    }


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
