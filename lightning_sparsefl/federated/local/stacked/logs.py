"""What `self.log` records for several clients: one vector for each key, in the arithmetic of Lightning's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_sparsefl.federated.local.stacked import functorch


class NotStackable(Exception):
    """A training step does something that has no meaning for several clients at once; the text is a clause."""

    _noted: ClassVar[list[Exception] | None] = None

    def __init__(self, clause: str) -> None:
        super().__init__(clause)
        self.note(self)

    @staticmethod
    def note(error: Exception) -> None:
        """Note an error of a function of torch, which may be that of one client.

        Args:
            error: The error.
        """
        if NotStackable._noted is not None:
            NotStackable._noted.append(error)

    @staticmethod
    @contextmanager
    def noted() -> Iterator[list[Exception]]:
        """Note all errors of functions of torch in the context, also those that the user's code catches."""
        before, noted = NotStackable._noted, list[Exception]()
        NotStackable._noted = noted
        try:
            yield noted
        finally:
            NotStackable._noted = before


class ChangesAttribute(NotStackable):
    """A step changes attributes of the module, of which each client needs values of its own.

    Args:
        clause: Clause that says what the step does.
        attributes: Path of the submodule, and name of its attribute, for each of them.
    """

    def __init__(self, clause: str, attributes: frozenset[tuple[str, str]]) -> None:
        super().__init__(clause)
        self.attributes = attributes


class SeesOneClient(NotStackable):
    """A hook of the module cannot see the gradients of several clients at once.

    Args:
        clause: Clause that says what the hook does.
        hook: Name of the hook.
    """

    def __init__(self, clause: str, hook: str) -> None:
        super().__init__(clause)
        self.hook = hook


@dataclass
class _Entry:
    """Values of one key."""

    on_step: bool
    on_epoch: bool
    reduce: str
    total: Tensor
    weights: list[int]
    """Number of samples of each client in this epoch."""
    newest: Tensor
    number: int
    """Number of keys that were logged first."""
    epochs: list[int]
    """Number of the last epoch in which each client has logged the key; -1 for none."""
    earlier: list[float]
    """Reduced values of the last epoch before this one in which the client logged the key."""

    def reduced(self) -> list[float]:
        """Return the reduced value of each client's last epoch that has one."""
        over = self.total / self.total.new_tensor(self.weights) if self.reduce == "mean" else self.total
        found = zip(over.tolist(), self.weights, self.earlier, strict=True)
        return [now if weight else before for now, weight, before in found]

    def values(self, name: str) -> Iterator[dict[str, float]]:
        """Iterate over the clients' last values of the key, and of those that are derived from it.

        Args:
            name: The key.
        """
        for newest, reduced in zip(self.newest.tolist(), self.reduced(), strict=True):
            if self.on_step and self.on_epoch:
                yield {name: reduced, f"{name}_step": newest, f"{name}_epoch": reduced}
            else:
                yield {name: reduced if self.on_epoch else newest}


class Logged(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Tensor
    """Plain tensor of all clients of the step, or one that is the same for all."""
    dim: int | None
    """Dimension of the clients; None for a tensor that is the same for all."""
    on_step: bool
    on_epoch: bool
    reduce: str
    batch_size: int
    dtype: torch.dtype
    """Default type of floats within the step, which the precision of the trainer chooses."""
    counted: bool
    """Whether `batch_size` is the number of samples of the batch, and not one that the call has given."""


class LoggedObject(NamedTuple):
    """One call of `self.log` with a metric object."""

    name: str
    metric: Metric
    on_step: bool
    on_epoch: bool


@dataclass
class _Object:
    """Values of one key that a metric object is logged as."""

    call: LoggedObject
    number: int
    """Number of keys that were logged first."""
    epochs: list[int]
    """Number of the last epoch in which each client has logged the key; -1 for none."""
    earlier: list[float]
    """Value of the last epoch before this one in which the client logged the key."""

    def reduced(self, states: ObjectStates, epoch: int) -> list[float]:
        """Return the value of each client's last epoch that has one, up to an epoch."""
        logged = [own == epoch for own in self.epochs]
        if not self.call.on_epoch or not any(logged):
            return self.earlier
        found = zip(states.compute(self.call.metric, logged), logged, self.earlier, strict=True)
        return [now if has else before for now, has, before in found]

    def values(self, name: str, states: ObjectStates, epoch: int) -> Iterator[dict[str, float]]:
        """Iterate over the clients' last values of the key, and of the one that is derived from it.

        Args:
            name: The key.
            states: States of the metric objects.
            epoch: Number of the epoch that runs.
        """
        keys = (name, f"{name}_epoch") if self.call.on_step else (name,)
        for value in self.reduced(states, epoch):
            yield dict.fromkeys(keys, value)


class ObjectStates(Protocol):
    """States of metric objects for several clients."""

    def compute(self, metric: Metric, logged: Sequence[bool]) -> list[float]:
        """Return the value of a metric object for each client that has logged it."""
        ...

    def reset(self, metric: Metric, logged: Sequence[bool]) -> None:
        """Reset a metric object for each client that has logged it."""
        ...


def _one() -> int:
    return 1


@dataclass
class StackedLog:
    """Receiver of `self.log` in a training step for several clients.

    Within the step, where each operation is slow, values are only copied; :meth:`collect` computes with them after it.

    Args:
        size: Number of clients.
    """

    size: int
    level: int = 0
    """Level of ``vmap`` of the step that runs."""
    low: int = 0
    """First client of the step that runs."""
    high: int = 0
    """Client after the last one of the step that runs."""
    samples: Callable[[], int] = _one
    """Function that returns the number of samples of each client in the step that runs."""
    pending: list[Logged] = field(default_factory=list)
    """What the step that runs has logged."""
    pending_objects: list[LoggedObject] = field(default_factory=list)
    """Metric objects that the step that runs has logged."""
    hook: str = ""
    """Hook of the module that runs; empty in a step."""
    of_epoch: bool = False
    """Whether the hook that runs logs values of an epoch, unless it chooses otherwise."""
    epoch: int = 0
    """Number of the epoch, from 1; 0 before the first one."""
    _entries: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    """By hook and key."""
    _objects: dict[tuple[str, str], _Object] = field(default_factory=dict)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Record a value of each client; the arguments are those of :meth:`lightning.pytorch.LightningModule.log`.

        Raises:
            NotStackable: If the value is no metric object, number or tensor of one number, or is reduced otherwise than
                by mean, sum, minimum or maximum.
        """
        if self.hook in _SILENT:
            raise NotStackable("logs values, which Lightning refuses there")
        if isinstance(batch_size, Tensor):
            raise NotStackable(f"logs {name!r} with a tensor as `batch_size`")
        on_step = not self.of_epoch if on_step is None else on_step
        on_epoch = self.of_epoch if on_epoch is None else on_epoch
        if isinstance(value, Metric):
            self._log_object(LoggedObject(name, value, on_step, on_epoch))
            return
        reduce = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if isinstance(value, (int, float)):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor) or reduce not in _REDUCTIONS:
            kind = (
                f"the object `{type(value).__name__}`" if reduce in _REDUCTIONS else "a value with its own `reduce_fx`"
            )
            raise NotStackable(f"logs {kind} as {name!r}")
        tensor, dim = functorch.unwrap(value, self.level) if functorch.is_batched(value) else (value, None)
        size = self.samples() if batch_size is None else batch_size
        counted, dtype = batch_size is None, torch.get_default_dtype()
        self.pending.append(Logged(name, tensor.clone(), dim, on_step, on_epoch, reduce, size, dtype, counted))

    def repeat(self, logged: Sequence[Logged], objects: Sequence[LoggedObject]) -> None:
        """Record again what a hook has logged for other clients, which is the same for all.

        Args:
            logged: Calls of `self.log`.
            objects: Calls of `self.log` with metric objects.
        """
        self.pending += [call._replace(batch_size=self.samples()) if call.counted else call for call in logged]
        self.pending_objects += objects

    def _log_object(self, call: LoggedObject) -> None:
        """Record a metric object, and the value that its `forward` has given in this step."""
        self.pending_objects.append(call)
        value: Any = call.metric._forward_cache
        if call.on_step and isinstance(value, Tensor):
            self.log(f"{call.name}_step" if call.on_epoch else call.name, value.detach(), on_step=True, batch_size=1)

    @contextmanager
    def of_hook(self, name: str, low: int, high: int, samples: Callable[[], int] | None = None) -> Iterator[None]:
        """Receive what a hook of the module logs within the context for several clients.

        Args:
            name: Name of the hook.
            low: First client.
            high: Client after the last one.
            samples: Function that returns the number of samples of the batch that the hook sees; None for another hook,
                whose values are those of an epoch.
        """
        before = (self.low, self.high, self.samples)
        self.low, self.high, self.samples = low, high, samples or _one
        self.hook, self.of_epoch = name, samples is None
        try:
            yield
            self.collect()
        finally:
            self.hook, self.of_epoch = "", False
            self.low, self.high, self.samples = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Receive what is logged within the context, such as by a second pass over a batch, in lists of its own."""
        before = (self.pending, self.pending_objects)
        self.pending, self.pending_objects = [], []
        try:
            yield
        finally:
            self.pending, self.pending_objects = before

    @contextmanager
    def receiving(self, module: LightningModule) -> Iterator[None]:
        """Receive what a module logs within the context.

        Args:
            module: Module of the user.
        """
        state = vars(module)
        before = {name: state.get(name) for name in ("log", "log_dict")}
        state["log"], state["log_dict"] = self.log, self.log_dict
        try:
            yield
        finally:
            for name, method in before.items():
                state.pop(name, None)
                if method is not None:
                    state[name] = method

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Record several values; the arguments are those of :meth:`lightning.pytorch.LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    @torch.no_grad()
    def collect(self) -> None:
        """Record what the step of the clients from `low` to before `high` has logged.

        Raises:
            NotStackable: If it has logged a tensor of several numbers.
        """
        for logged in self.pending:
            self._record(logged)
        for call in self.pending_objects:
            self._record_object(call)
        self.pending.clear()
        self.pending_objects.clear()
        self.samples = _one  # which lets go of the batch, so that the next one takes its memory

    def _record_object(self, call: LoggedObject) -> None:
        known = self._objects.get((self.hook, call.name))
        if known is None:
            known = _Object(call, self._number, [-1] * self.size, [math.nan] * self.size)
            self._objects[self.hook, call.name] = known
        elif known.call.metric is not call.metric or known.call[2:] != call[2:]:
            raise NotStackable(f"logs {call.name!r} with other options than before")
        known.epochs[self.low : self.high] = [self.epoch] * (self.high - self.low)

    @property
    def _number(self) -> int:
        return len(self._entries) + len(self._objects)

    def _record(self, logged: Logged) -> None:
        count, value = self.high - self.low, logged.value
        if logged.dim is None:
            value = value.expand(count, *value.shape)
        values = value if value.dim() == 1 else (value.movedim(logged.dim, 0) if logged.dim else value).flatten()
        if values.numel() != count:
            raise NotStackable(f"logs a tensor of several numbers as {logged.name!r}")
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(logged.dtype)
        entry = self._entries.get((self.hook, logged.name))
        if entry is None:
            entry = self._entries[self.hook, logged.name] = self._entry(logged, values)
        elif (entry.on_step, entry.on_epoch, entry.reduce) != (logged.on_step, logged.on_epoch, logged.reduce):
            raise NotStackable(f"logs {logged.name!r} with other options than before")
        entry.epochs[self.low : self.high] = [self.epoch] * count
        if entry.on_step or not entry.on_epoch:
            entry.newest = entry.newest.to(torch.promote_types(entry.newest.dtype, values.dtype))
            entry.newest[self.low : self.high] = values
        if entry.on_epoch:
            self._reduce(entry, values, logged.batch_size)

    def _entry(self, logged: Logged, values: Tensor) -> _Entry:
        newest = values.new_zeros(self.size)
        total = newest.new_full((self.size,), _STARTS.get(logged.reduce, 0.0))
        total = total.to(torch.promote_types(total.dtype, logged.dtype))  # as Lightning's results
        weights, epochs, missing = [0] * self.size, [-1] * self.size, [math.nan] * self.size
        kind = (logged.on_step, logged.on_epoch, logged.reduce)
        return _Entry(*kind, total, weights, newest, self._number, epochs, missing)

    def _reduce(self, entry: _Entry, values: Tensor, batch_size: int) -> None:
        total = entry.total if values.numel() == self.size else entry.total[self.low : self.high]
        if entry.reduce == "mean":
            total += values * batch_size
        elif entry.reduce == "sum":
            total += values
        else:
            chosen = torch.minimum if entry.reduce.endswith("min") else torch.maximum
            chosen(total, values, out=total)
        for place in range(self.low, self.high):
            entry.weights[place] += batch_size

    def start_epoch(self, states: ObjectStates) -> None:
        """Begin the values of an epoch, for which the metric objects that have been logged are reset.

        Args:
            states: States of the metric objects.
        """
        for entry in self._entries.values():
            entry.earlier = entry.reduced()
            entry.total.fill_(_STARTS.get(entry.reduce, 0.0))
            entry.weights = [0] * self.size
        for each in self._objects.values():
            each.earlier = each.reduced(states, self.epoch)
        for each in self._objects.values():
            states.reset(each.call.metric, [epoch >= 0 for epoch in each.epochs])
        self.epoch += 1

    def metrics(self, states: ObjectStates) -> list[dict[str, float]]:
        """Return the last value of each key for each client, as `trainer.callback_metrics` has them after a fit.

        Args:
            states: States of the metric objects.
        """
        found: list[list[tuple[tuple[int, bool, int], dict[str, float]]]] = [[] for _ in range(self.size)]
        for (_, name), entry in self._entries.items():
            for own, epoch, values in zip(found, entry.epochs, entry.values(name), strict=True):
                own.append(((epoch, entry.on_epoch, entry.number), values))
        for (_, name), each in self._objects.items():
            if each.call.on_epoch:
                for own, epoch, values in zip(found, each.epochs, each.values(name, states, self.epoch), strict=True):
                    own.append(((epoch, True, each.number), values))
        # of a key that is logged in two places, the value of the later epoch stays, as in Lightning
        return [dict(chain(*(v.items() for (at, *_), v in sorted(own, key=itemgetter(0)) if at >= 0))) for own in found]


@dataclass
class EvaluationLog(StackedLog):
    """Receiver of `self.log` in a validation or test step for several clients, which keeps values of epochs only."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Record a value of each client; the arguments are those of :meth:`lightning.pytorch.LightningModule.log`."""
        on_epoch = True if on_epoch is None else on_epoch
        if on_epoch:
            super().log(name, value, prog_bar, logger, bool(on_step), on_epoch, *args, **options)

    def _log_object(self, call: LoggedObject) -> None:
        self.pending_objects.append(call)

    def results(self, states: ObjectStates) -> list[dict[str, float]]:
        """Return the value of each key for each client, as an evaluation returns them, and forget the values.

        Args:
            states: States of the metric objects.
        """
        found = self.metrics(states)
        for (_, name), entry in self._entries.items():
            if entry.on_step:
                for metrics in found:
                    metrics.pop(f"{name}_step", None)
        self._entries, self._objects = {}, {}
        return found


_SILENT = ("on_fit_start", "on_train_end", "on_validation_end", "on_test_end")
"""Hooks in which nothing can be logged."""
_REDUCTIONS = ("mean", "sum", "min", "max", "amin", "amax")
_STARTS = {"min": float("inf"), "amin": float("inf"), "max": float("-inf"), "amax": float("-inf")}
