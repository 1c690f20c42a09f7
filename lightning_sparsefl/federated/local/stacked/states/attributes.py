"""Attributes of a module that steps and hooks change, with the values of several clients at once."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_sparsefl.callbacks.object_states import PLAIN
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules import address
from lightning_sparsefl.sparse.containers import containers_in, content_of, fill, has_content

_CONTAINERS = (list, deque, set, dict, Counter, OrderedDict, defaultdict)
"""Types of containers that may have other contents for each client."""
_FLAT = {Tensor, *PLAIN}
"""Types of values in which nothing but numbers of tensors can be changed in place."""
_MISSING = object()


@dataclass(frozen=True)
class _Original:
    """Stands for the container that a slot had before, whose content is stored beside it."""

    place: int


class _Slot(NamedTuple):
    """One attribute as it was before."""

    name: str
    table: dict[str, Any]
    key: str
    value: Any

    def show(self, value: Any) -> None:
        """Set the attribute, or delete it for a value that is missing."""
        if value is _MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class _Held(NamedTuple):
    """Values of clients that have stepped together."""

    size: int
    values: list[Any]
    """Values of the slots, then the contents of the containers that the module had before; their tensors have the
    clients in dimension 0, but for those that the module had before."""


class AttributeStates:
    """Values of a module's attributes for several clients, each of which begins with those of the module.

    The module itself keeps its values, but for the context of :meth:`AttributeRows.shown`. Numbers and strings are the
    same for clients that step together; tensors are not, and neither is the length of lists of clients that do not.

    Args:
        module: Module of the user.
        names: Path of a submodule and name of its attribute, for each attribute.
        size: Number of clients.
    """

    def __init__(self, module: nn.Module, names: Collection[tuple[str, str]], size: int) -> None:
        self.slots = [_slot(module, path, key) for path, key in sorted(names)]
        self._known: dict[int, Any] = {id(_MISSING): _MISSING}
        """Tensors that the module had before, and objects that are no containers, by identity."""
        found = (each for slot in self.slots for each in containers_in(slot.value) or () if type(each) in _CONTAINERS)
        self._originals = list({id(each): each for each in found}.values())
        """Containers that the module had before, also those in others, which others may hold too."""
        self._contents = [content_of(each) for each in self._originals]
        self.storages: frozenset[int] = frozenset()
        """Memory of the weights of all clients."""
        first = _Held(size, self._read(self._note, self._note))
        self.held = [(first, place) for place in range(size)]
        """Values of each client, and its place among the clients that have them."""

    def _note(self, value: Any) -> Any:
        return self._known.setdefault(id(value), value)

    def _read(
        self,
        tensors: Callable[[Tensor], Tensor],
        others: Callable[[Any], Any],
        shown: _ListItems | None = None,
        stored: _ListItems | None = None,
    ) -> list[Any]:
        """Return copies of the values and contents of the attributes as they are now."""
        originals = {id(each): (each, _Original(at)) for at, each in enumerate(self._originals)}
        copier = _Copier(tensors, others, originals, shown, stored)
        values = [copier.copy(slot.table.get(slot.key, _MISSING)) for slot in self.slots]
        return values + [copier.content(each) for each in self._originals]

    def _unless_known(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that leaves the tensors as they are that the module had before."""
        return lambda tensor: tensor if id(tensor) in self._known else function(tensor)

    def store(
        self, low: int, high: int, tensors: Callable[[Tensor], Tensor], shown: _ListItems, stored: _ListItems
    ) -> None:
        """Store the attributes as they are now as those of the clients from `low` to before `high`.

        Args:
            low: First client.
            high: Client after the last one.
            tensors: Function of a tensor within a step that returns one with the clients in dimension 0.
            shown: Items of lists as they were shown, with what is stored of them.
            stored: Receiver of the items that stayed, by the stored list, with what was shown of them.
        """

        def same(value: Any) -> Any:
            if id(value) in self._known:
                return value
            raise NotStackable(f"keeps a `{type(value).__name__}` in {self._names}, which all clients share")

        held = _Held(high - low, self._read(self._unless_known(tensors), same, shown, stored))
        self.held[low:high] = [(held, place) for place in range(high - low)]

    @property
    def _names(self) -> str:
        return " and ".join(f"`{slot.name}`" for slot in self.slots)

    def show(
        self, values: Sequence[Any], function: Callable[[Tensor], Tensor], stored: _ListItems, shown: _ListItems
    ) -> None:
        """Give the module stored values.

        Args:
            values: The values.
            function: Function that is applied to the tensors of clients.
            stored: Items of stored lists, with what was shown of them.
            shown: Receiver of the items that are shown, by the list that the module has, with what is stored of them.
        """
        originals = self._originals

        def others(value: Any) -> Any:
            return originals[value.place] if isinstance(value, _Original) else value

        given = self.mapped(values, function, others, stored, shown)
        for slot, value in zip(self.slots, given, strict=False):
            slot.show(value)
        for container, content in zip(originals, given[len(self.slots) :], strict=True):
            fill(container, content)
            shown.move(content, container)

    def contents(self) -> list[Any]:
        """Return the identities of the attributes, of the containers in them and of their items, as they are now."""
        found: list[Any] = []
        for slot in self.slots:
            value = slot.table.get(slot.key, _MISSING)
            containers = containers_in(value)
            # one with too many items to look into equals nothing
            found.append(id(value) if containers is not None else object())
            for each in containers or ():
                found += [id(each), list(map(id, each)), list(map(id, each.values())) if isinstance(each, dict) else ()]
        return found

    def restore(self) -> None:
        """Give the module what it had before."""
        for slot in self.slots:
            slot.show(slot.value)
        for container, content in zip(self._originals, self._contents, strict=True):
            fill(container, content)

    def changed_contents(self) -> list[str]:
        """Return the names of attributes whose containers have other contents for a client than the module's."""
        changed = set[int]()
        for held in {id(held): held for held, _ in self.held}.values():
            pairs = zip(self._originals, held.values[len(self.slots) :], self._contents, strict=True)
            changed |= {id(each) for each, now, before in pairs if not has_content(now, before)}
        names = [slot.name for slot in self.slots if changed & set(map(id, containers_in(slot.value) or ()))]
        return sorted(names)

    @contextmanager
    def hidden(self, reads: str) -> Iterator[dict[int, Any]]:
        """Refuse to read the attributes within the context, in which code of the module runs for several clients.

        Args:
            reads: Start of the clause that says what reads them; it ends with "reads".

        Yields:
            Receiver, at the end of the context, of the numbers and strings that attributes have been set to, by the
            number of the slot, for :meth:`assign`.

        Raises:
            NotStackable: If an attribute has been set to another kind of value.
        """
        written: dict[int, Any] = {}
        hidden = [_Hidden(f"{reads} `{slot.name}`, of which each client has its own") for slot in self.slots]
        for slot, stand_in in zip(self.slots, hidden, strict=True):
            slot.show(stand_in)
        try:
            yield written
            values = [slot.table.get(slot.key, _MISSING) for slot in self.slots]
        finally:
            self.restore()
        for number, (value, stand_in) in enumerate(zip(values, hidden, strict=True)):
            if value is stand_in:
                continue
            if isinstance(value, _Hidden):  # that of another attribute
                raise NotStackable(vars(value)["clause"])
            if value is not _MISSING and type(value) not in PLAIN:
                what = f"`{self.slots[number].name}` to a `{type(value).__name__}`"
                raise NotStackable(f"{reads.removesuffix('reads')}sets {what}, of which each client needs its own")
            written[number] = value

    def assign(self, low: int, high: int, values: Mapping[int, Any]) -> None:
        """Set attributes of the clients from `low` to before `high` to the same numbers and strings.

        Args:
            low: First client.
            high: Client after the last one.
            values: The values, by the number of the slot.
        """
        if not values:
            return
        new: dict[int, _Held] = {}
        for place in range(low, high):
            held, row = self.held[place]
            if id(held) not in new:
                new[id(held)] = _Held(held.size, [values.get(at, value) for at, value in enumerate(held.values)])
            self.held[place] = (new[id(held)], row)

    def part(self, low: int, high: int) -> AttributeRows:
        """Return the values of the clients from `low` to before `high`.

        Args:
            low: First client.
            high: Client after the last one.
        """
        return AttributeRows(self, low, high)

    def phases(self, low: int, high: int) -> list[Hashable]:
        """Return for each client what must agree for clients to step together: all but the numbers in tensors.

        Args:
            low: First client.
            high: Client after the last one.
        """
        own = [held for held, _ in self.held[low:high]]
        found = {id(held): tuple(map(self._layout, held.values)) for held in own}
        return [found[id(held)] for held in own]

    def _layout(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            own = id(value) in self._known
            return id(value) if own else (Tensor, value.shape[1:], value.dtype, value.requires_grad)
        if isinstance(value, Mapping):
            return (type(value), tuple((key, self._layout(item)) for key, item in value.items()))
        if isinstance(value, (list, tuple, deque)) and type(value) is not torch.Size:
            return (type(value), tuple(map(self._layout, value)))
        if isinstance(value, set):
            return (set, frozenset(map(self._layout, value)))
        return (type(value), value if isinstance(value, (*PLAIN, _Original)) else id(value))

    def values(self, low: int, high: int) -> list[Any]:
        """Return the values and contents for the clients from `low` to before `high`.

        Args:
            low: First client.
            high: Client after the last one.
        """
        own = self.held[low:high]
        held = own[0][0]
        if held.size == high - low and all(each is held and place == at for at, (each, place) in enumerate(own)):
            return held.values
        if high - low == 1:
            at = own[0][1]
            return self.mapped(held.values, lambda tensor: tensor[at : at + 1])
        if len(set(self.phases(low, high))) > 1:
            raise NotStackable("keeps other values in attributes for other clients")
        rows = [self._rows(*each) for each in own]
        self._require_apart(rows[0], self.storages)
        stacked = map(torch.stack, zip(*rows, strict=True))
        return self.mapped(held.values, lambda tensor: next(stacked))

    def _require_apart(self, tensors: Sequence[Tensor], others: Collection[int] = ()) -> None:
        """Raise :class:`NotStackable` if copies of tensors would not be written with each other, as they are.

        Args:
            tensors: The tensors.
            others: Memory of other tensors that may be written.
        """
        places = list(map(address, tensors))
        if len(set(places)) < len(places) or not set(places).isdisjoint(others):
            raise NotStackable(f"keeps a weight itself, or two views of one tensor, in {self._names}")

    def addresses(self, low: int, high: int) -> set[int]:
        """Return the addresses of the memory of the tensors of the clients from `low` to before `high`.

        Args:
            low: First client.
            high: Client after the last one.
        """
        rows = [row for held, place in self.held[low:high] for row in self._rows(held, place)]
        return set(map(address, rows))

    def _rows(self, held: _Held, place: int) -> list[Tensor]:
        """Return the tensors of one client."""
        found: list[Tensor] = []

        def add(tensor: Tensor) -> Tensor:
            found.append(tensor[place])
            return tensor

        self.mapped(held.values, add)
        return found

    def mapped(
        self,
        values: Sequence[Any],
        function: Callable[[Tensor], Tensor],
        others: Callable[[Any], Any] = lambda value: value,
        known: _ListItems | None = None,
        noted: _ListItems | None = None,
    ) -> list[Any]:
        """Return copies of stored values.

        Args:
            values: The values.
            function: Function that is applied to the tensors of clients.
            others: Function that is applied to objects that are neither tensors nor containers.
            known: Items of lists with their copies; None = none.
            noted: Receiver of the items that are copied; None = none.
        """
        copier = _Copier(self._unless_known(function), others, {}, known, noted, all_items=True)
        return [copier.copy(value) for value in values]


class AttributeRows:
    """The values of a module's attributes for some of the clients.

    Args:
        states: Values of all clients.
        low: First client.
        high: Client after the last one.
    """

    def __init__(self, states: AttributeStates, low: int, high: int) -> None:
        self.states, self.low, self.high = states, low, high
        self._stored, self._level = _ListItems(), 0
        """Items of stored lists, with what the last step has seen of them at this level."""

    def addresses(self) -> set[int]:
        """Return the addresses of the memory of the clients' tensors."""
        return self.states.addresses(self.low, self.high)

    @contextmanager
    def shown(self, level: int) -> Iterator[None]:
        """Give the module the values of the clients within the context, and store what has become of them.

        Args:
            level: Number of the level of ``vmap``; 0 outside of one, for a single client.
        """
        states, size = self.states, self.high - self.low
        if not states.slots:
            yield
            return

        whole: dict[int, tuple[Tensor, Tensor]] = {}  # what is shown, and what it is a view of
        common: list[Tensor] = []
        before, shown = self._stored if level == self._level else _ListItems(), _ListItems()
        self._stored, self._level = _ListItems(), level

        def given(tensor: Tensor) -> Tensor:
            view: Tensor | None = before.copy_of(tensor)
            if view is None:
                view = functorch.wrap(tensor, 0, level) if level else tensor[0]
            whole[id(view)] = (view, tensor)
            return view

        def stored(tensor: Tensor) -> Tensor:
            known: Tensor | None = whole[id(tensor)][1] if id(tensor) in whole else shown.copy_of(tensor)
            if known is not None:
                return known
            if not level:
                return tensor.unsqueeze(0)
            value, dim = functorch.unwrap(tensor, level) if functorch.is_batched(tensor) else (tensor, None)
            if dim is not None:
                return value.movedim(dim, 0)
            common.append(value)
            states._require_apart(common)
            return value.expand(size, *value.shape).clone()  # into which the next step may write

        try:
            states.show(states.values(self.low, self.high), given, before, shown)
            # a single client's tensors are views of those of several, into which it writes
            looks = states.contents() if size == 1 < states.held[self.low][0].size else None
            yield
            if looks is None or looks != states.contents():
                states.store(self.low, self.high, stored, shown, self._stored)
        finally:
            states.restore()

    def phases(self) -> list[Hashable]:
        """Return for each client what must agree for clients to step together; see :meth:`AttributeStates.phases`."""
        return self.states.phases(self.low, self.high)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the values when the context ends."""
        states = self.states
        if not states.slots:
            yield
            return
        before = states.held[self.low : self.high]
        copied = states.mapped(states.values(self.low, self.high), torch.clone)
        states.held[self.low : self.high] = [(_Held(len(before), copied), place) for place in range(len(before))]
        try:
            yield
        finally:
            states.held[self.low : self.high] = before


class _ListItems:
    """Items of lists with their copies, so that those that stay in a list are not copied again at each step.

    A list to which each of n steps appends a tensor would else take a time that grows with the square of n.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        """List, its items, and their copies, by the identity of the list."""

    def copies(self, container: Any, items: Sequence[Any]) -> list[Any]:
        """Return the copies of the first items of a list, as far as they are known.

        Args:
            container: The list.
            items: Items of the list.
        """
        _, before, copied = self._known.get(id(container), (None, [], []))
        return copied if len(items) >= len(before) and all(map(operator.is_, items, before)) else []

    def copy_of(self, item: Any) -> Any:
        """Return the copy of an item of one of the lists; None for another object.

        Args:
            item: The item.
        """
        for _, items, copied in self._known.values():
            found = list(map(operator.is_, items, repeat(item)))  # at the speed of C
            if True in found:
                return copied[found.index(True)]
        return None

    def note(self, container: Any, items: list[Any], copied: list[Any]) -> None:
        """Note the copies of the first items of a list, if nothing in it can be changed in place but tensors.

        Args:
            container: The list.
            items: First items of the list.
            copied: Copies of the items.
        """
        if items and set(map(type, items)) <= _FLAT:
            self._known[id(container)] = (container, items, copied)

    def move(self, one: Any, other: Any) -> None:
        """Note that a list has been given the items of another one.

        Args:
            one: List whose items are noted, if any.
            other: List that has them.
        """
        if id(one) in self._known:
            _, items, copied = self._known.pop(id(one))
            self._known[id(other)] = (other, items, copied)


class _Copier:
    """Copies nested containers; what occurs twice is copied once.

    Args:
        tensors: Function that is applied to tensors.
        others: Function that is applied to objects that are no containers.
        known: Objects with what stands for them, by identity.
        items: Items of lists with their copies; None = none.
        noted: Receiver of the copied items of lists, by the copy; None = none.
        all_items: Whether all items are noted, and not only those whose copies are known.
    """

    def __init__(
        self,
        tensors: Callable[[Tensor], Tensor],
        others: Callable[[Any], Any],
        known: Mapping[int, tuple[Any, Any]],
        items: _ListItems | None = None,
        noted: _ListItems | None = None,
        all_items: bool = False,
    ) -> None:
        self._tensors, self._others = tensors, others
        self._items, self._noted, self._all_items = items or _ListItems(), noted or _ListItems(), all_items
        self._memo = dict(known)  # with the objects themselves, so that no other gets their identity

    def copy(self, value: Any) -> Any:
        """Return the copy of a value."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._memo:
            self._memo[id(value)] = (value, self._new(value))
        return self._memo[id(value)][1]

    def _new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensors(value)
        if isinstance(value, tuple):
            items = list(map(self.copy, value))
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is set and any(isinstance(item, Tensor) for item in value):
            raise NotStackable("keeps tensors in a set")
        return self.content(value) if type(value) in _CONTAINERS else self._others(value)

    def content(self, container: Any) -> Any:
        """Return a container of the same type with copies of the items."""
        new = copy(container)
        if isinstance(container, Mapping):
            return fill(new, {key: self.copy(item) for key, item in container.items()})
        if isinstance(container, set):
            return fill(new, set(map(self.copy, container)))
        items = list(container)
        copied = self._items.copies(container, items)
        number = None if self._all_items else len(copied)
        copied = [*copied, *map(self.copy, items[len(copied) :])]
        self._noted.note(new, copied[:number], items[:number])
        return fill(new, copied)


def _slot(module: nn.Module, path: str, key: str) -> _Slot:
    """Return an attribute of a submodule as it is now."""
    table = vars(module.get_submodule(path))
    return _Slot(".".join(filter(None, ("self", path, key))), table, key, table.get(key, _MISSING))


class _Hidden:
    """Stand-in for a value that raises when it is used.

    Args:
        clause: Clause of the error.
    """

    def __init__(self, clause: str) -> None:
        vars(self)["clause"] = clause

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotStackable(vars(self)["clause"])

    __getattr__ = __setattr__ = __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = __str__ = __repr__ = __format__ = __hash__ = _refuse
    __neg__ = __abs__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
