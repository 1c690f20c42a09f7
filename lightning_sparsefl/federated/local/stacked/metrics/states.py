"""The states of metric objects for several clients at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_mean

from lightning_sparsefl.callbacks.stacking.hidden_metrics import METHODS, SharedCount, hidden
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.metrics.checks import ValueCheck, check_of
from lightning_sparsefl.federated.local.stacked.metrics.single_calls import ListState, MetricUse
from lightning_sparsefl.federated.local.stacked.states.leaves import layout_of, unwrapped
from lightning_sparsefl.sparse.attributes import attributes_replaced

_OF_USES = (
    *("_update_count", "_computed", "_forward_cache", "_cache", "_enable_grad"),
    *("_is_synced", "_to_sync", "_should_unsync", "compute_on_cpu"),
)
"""Attributes of metrics, besides the states, that their methods set."""
_UNGROUPED = {"_enable_compute_groups": False, "_groups": {}, "_groups_checked": False, "_state_is_copy": False}
"""Attributes of a collection of metrics each of which counts for itself, since groups are found by values."""


class CountChange(NamedTuple):
    """What a step does to the number of updates of a metric object."""

    is_reset: bool
    """Whether the number is set to 0 first."""
    updates: int
    """Number of updates that are added."""

    def of(self, count: int) -> int:
        """Return a number after the step.

        Args:
            count: The number before it.
        """
        return self.updates if self.is_reset else count + self.updates


class _Slot(NamedTuple):
    """One state of one metric object."""

    table: dict[str, Any]
    """Attributes of the metric object."""
    key: str
    states: Tensor
    """States of all clients."""
    default: Tensor
    """State after a reset, as `forward` of the metric object makes one."""


class MetricStates:
    """Sums and counts in the metric objects of a module, with the clients in dimension 0.

    The objects themselves keep what they hold, but for the context of :meth:`MetricRows.shown`.

    Args:
        module: Module of the user, whose metric objects are reset.
        size: Number of clients.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size = size
        self.metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self.slots: list[_Slot] = []
        for metric in self.metrics.values():
            table = vars(metric)  # in which `setattr` of a metric puts its states, too, after many questions
            for key, default in metric._defaults.items():
                # a wrapper may show the states of another object
                if isinstance(default, Tensor) and key in table:
                    states = table[key].expand(size, *table[key].shape).clone()
                    self.slots.append(_Slot(table, key, states, default))
        self.counts = [[metric._update_count] * size for metric in self.metrics.values()]
        """Number of updates of each metric object by each client."""
        self.uses: list[MetricUse] = []
        """How clients use each metric object."""
        self._checks: dict[str, ValueCheck] = {}
        self._flags: dict[str, Tensor] = {}
        for name, metric in self.metrics.items():
            lent = {name: getattr(metric, name) for name in METHODS}
            check, own = check_of(metric), {**lent, "_defaults": metric._defaults}
            if check is not None:
                own |= {key: getattr(metric, key) for key in check.replaced()}
                lent.update(check.replaced())
                flags = check.flag.expand(size).clone()
                self.slots.append(_Slot(vars(check), "flag", flags, check.flag))
                self._checks[name], self._flags[name] = check, flags
            lists = [
                ListState(key, [list(vars(metric)[key]) for _ in range(size)])
                for key, default in metric._defaults.items()
                if isinstance(default, list) and key in vars(metric)
            ]
            self.uses.append(MetricUse(metric, lent, own, lists))
        self._collections = [child for child in module.modules() if isinstance(child, MetricCollection)]
        self.read = {
            place for place, metric in enumerate(self.metrics.values()) if dim_zero_mean in metric._reductions.values()
        }
        """Places of the metric objects whose number of updates is read, as `forward` does to average a state."""
        self.asked: set[int] = set()
        """Places of the metric objects of which a step asks whether there has been an update."""
        self.lists = [each.rows for use in self.uses for each in use.lists]

    def part(self, low: int, high: int) -> MetricRows:
        """Return the states of the clients from `low` to before `high`, which are views of these.

        Args:
            low: First client.
            high: Client after the last one.
        """
        return MetricRows(self, low, high)

    def phase(self, client: int) -> tuple[int, ...]:
        """Return what must agree for clients to step together.

        Args:
            client: Place of the client.
        """
        return tuple(self.counts[place][client] for place in sorted(self.read))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse to use the metric objects within the context, but for that of :meth:`MetricRows.shown`."""
        with ExitStack() as stack:
            for name, metric in self.metrics.items():
                stack.enter_context(attributes_replaced(metric, hidden(metric, _refusal(name))))
            yield

    @contextmanager
    def lent(self, counts: Sequence[SharedCount]) -> Iterator[None]:
        """Let clients use the metric objects within the context, and restore what the objects hold afterwards.

        Args:
            counts: Number of updates of each metric object.
        """
        with ExitStack() as stack:
            for use, count in zip(self.uses, counts, strict=True):
                defaults = use.metric._defaults
                values = {**use.lent, "_update_count": count, "_defaults": dict(defaults)}
                states = [name for name in defaults if name in vars(use.metric)]
                stack.enter_context(attributes_replaced(use.metric, values, (*_OF_USES, *states)))
            for check in self._checks.values():
                stack.enter_context(attributes_replaced(check, {"_defaults": dict(check._defaults)}, ("flag",)))
            for collection in self._collections:
                stack.enter_context(attributes_replaced(collection, _UNGROUPED))
            yield

    def require_usual(self) -> None:
        """Raise :class:`NotStackable` if a metric object got a value that it removes or refuses."""
        if self._flags and bool(torch.stack(list(self._flags.values())).any()):
            name = next(name for name, flags in self._flags.items() if bool(flags.any()))
            raise NotStackable(f"gives the metric object `self.{name}` NaN, or labels that are out of range")

    def compute(self, metric: Metric, logged: Sequence[bool]) -> list[float]:
        """Return the value of a metric object for each client.

        The values are computed at once where each operation has a batched form, which depends on the version of torch,
        and else one by one.

        Args:
            metric: Metric object of the module.
            logged: Whether each client has logged it; the value of one that has not has no meaning.
        """
        try:
            with functorch.vmap_level(self.size) as level, self.part(0, self.size).shown(level):
                value = unwrapped(metric.compute(), level, self.size)
        except Exception:  # of `torch.func`, or of the user's code, which then raises it again
            return [self._value(metric, place) if has else math.nan for place, has in enumerate(logged)]
        _require_one_number(metric, value.ndim - 1)
        found: list[float] = value.tolist()
        return found

    def _value(self, metric: Metric, place: int) -> float:
        """Return the value of a metric object for the client at a place of the stack."""
        with self.part(place, place + 1).shown(0):
            value = torch.as_tensor(metric.compute())
        _require_one_number(metric, value.ndim)
        return float(value)

    def reset(self, metric: Metric, logged: Sequence[bool]) -> None:
        """Reset a metric object for the clients that have logged it.

        Args:
            metric: Metric object of the module.
            logged: Whether each client has logged it.
        """
        others = [place for place, has in enumerate(logged) if not has]
        every = self.part(0, self.size)
        states, counts, lists = [tensor[others] for tensor in every.tensors], every.updates, every.lists
        with functorch.vmap_level(self.size) as level, every.shown(level):
            metric.reset()
        for tensor, own in zip(every.tensors, states, strict=True):
            tensor[others] = own
        for place in others:
            for count, before in zip(self.counts, counts, strict=True):
                count[place] = before[place]
            for samples, kept in zip(self.lists, lists, strict=True):
                samples[place] = kept[place]


class MetricRows:
    """The states of metric objects for some of the clients.

    Args:
        states: States of all clients.
        low: First client.
        high: Client after the last one.
    """

    def __init__(self, states: MetricStates, low: int, high: int) -> None:
        self._states, self.low, self.high = states, low, high
        self._clients = slice(low, high)
        self.changes: Sequence[CountChange] = ()
        """What the last step has done to the number of updates of each metric object."""

    @cached_property
    def tensors(self) -> list[Tensor]:
        """States of the clients, which are views."""
        return [slot.states[self._clients] for slot in self._states.slots]

    @cached_property
    def _layout(self) -> Hashable:
        return layout_of(self.tensors)

    @property
    def key(self) -> Hashable:
        """Layout of the states, and what the operations on them depend on."""
        counts, asked = self._states.counts, sorted(self._states.asked)
        begun = tuple((place, counts[place][self._clients.start] > 0) for place in asked)
        return (self._layout, self.read_updates, begun)

    @property
    def lists(self) -> list[list[list[Any]]]:
        """Lists of samples of each of the clients, for each list of a metric object."""
        return [[list(samples) for samples in rows[self._clients]] for rows in self._states.lists]

    @property
    def calls_singly(self) -> bool:
        """Whether methods of metric objects are called for one client after another, which no recording can repeat."""
        return any(use.single for use in self._states.uses)

    @property
    def updates(self) -> list[list[int]]:
        """Number of updates of each metric object by each of the clients."""
        return [counts[self._clients] for counts in self._states.counts]

    @updates.setter
    def updates(self, found: Sequence[Sequence[int]]) -> None:
        for counts, own in zip(self._states.counts, found, strict=True):
            counts[self._clients] = own

    @property
    def read_updates(self) -> tuple[int, ...]:
        """Number of updates of each metric object for which it is read; it is the same for all of the clients."""
        return self._states.phase(self._clients.start)

    def _count(self, place: int, name: str) -> SharedCount:
        """Return the number of updates of a metric object as the clients see it."""
        counts = self._states.counts[place][self._clients]

        def note() -> None:
            if len(set(counts)) > 1:
                raise NotStackable(f"reads the number of updates of `self.{name}`, of which each client has its own")
            self._states.read.add(place)

        asked = partial(self._states.asked.add, place)
        return SharedCount(max(counts), note, all(counts) or not any(counts), asked)

    def count(self, changes: Sequence[CountChange]) -> None:
        """Count the updates of a step by each of the clients.

        Args:
            changes: Change of the number of each metric object.
        """
        self.updates = [list(map(change.of, counts)) for counts, change in zip(self.updates, changes, strict=True)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states, and the numbers of updates, when the context ends."""
        before, updates, lists = [tensor.clone() for tensor in self.tensors], self.updates, self.lists
        try:
            yield
        finally:
            for tensor, value in zip(self.tensors, before, strict=True):
                tensor.copy_(value)
            self.updates = updates
            for rows, kept in zip(self._states.lists, lists, strict=True):
                rows[self._clients] = kept

    @contextmanager
    def shown(self, level: int) -> Iterator[None]:
        """Give the metric objects the states of the clients within the context, and write the states back afterwards.

        Args:
            level: Number of the level of ``vmap``; 0 outside of one, for a single client.
        """
        metrics = self._states.metrics
        counts = [self._count(place, name) for place, name in enumerate(metrics)]
        with self._states.lent(counts):
            given = [functorch.wrap(own, 0, level) if level else own[0] for own in self.tensors]
            for slot, own, state in zip(self._states.slots, self.tensors, given, strict=True):
                slot.table[slot.key] = state
                if level:  # so that `update` may add in place to what a reset gives
                    default = slot.default.expand(len(own), *slot.default.shape)
                    slot.table["_defaults"][slot.key] = functorch.wrap(default, 0, level)
            self._show_lists(level)
            yield
            with torch.no_grad():
                self._write_back(given, level)
            self.changes = [
                _change_of(each._update_count, count) for each, count in zip(metrics.values(), counts, strict=True)
            ]
            self.count(self.changes)

    def _show_lists(self, level: int) -> None:
        """Give the metric objects the client's lists of samples, or the methods of several clients."""
        low = self._clients.start
        for use, counts in zip(self._states.uses, self.updates, strict=True):
            if level:
                vars(use.metric).update(use.methods(low, counts, level))
            else:
                vars(use.metric).update({each.key: each.rows[low] for each in use.lists})

    def _write_back(self, given: Sequence[Tensor], level: int) -> None:
        """Write the states back that the metric objects have replaced; others have been written in place, if at all."""
        slots = zip(self._states.slots, self.tensors, given, strict=True)
        replaced = [(own, slot.table[slot.key]) for slot, own, state in slots if slot.table[slot.key] is not state]
        found = [(own, unwrapped(state, level, len(own)).clone()) for own, state in replaced]  # one may be another one
        for own, state in found:
            if state.shape != own.shape or state.dtype is not own.dtype:
                raise NotStackable("changes the shape or the type of a metric object's state")
            own.copy_(state)
        if not level:
            for use in self._states.uses:
                for each in use.lists:
                    each.rows[self._clients.start] = vars(use.metric)[each.key]


def _change_of(now: Any, before: SharedCount) -> CountChange:
    """Return what has been done to a number of updates, which a reset replaces by a plain number."""
    return CountChange(False, now.value - before.value) if isinstance(now, SharedCount) else CountChange(True, now)


def _require_one_number(metric: Metric, dimensions: int) -> None:
    if dimensions:
        raise NotStackable(f"logs the object `{type(metric).__name__}`, whose value is not one number")


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to use a metric object of the module."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotStackable(f"is followed by uses of the metric object `self.{name}`, of which each client has its own")

    return refuse
