"""What `self.log` records for several clients: one vector for each key, in the arithmetic of Lightning's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_sparsefl.federated.local.stacked import functorch


class NotStackable(Exception):
    """A training step does something that has no meaning for several clients at once; the text is a clause."""


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
    logged: list[bool]
    """Whether each client has logged the key at all."""
    earlier: list[float]
    """Reduced values of the last epoch before this one in which the client logged the key."""

    def reduced(self) -> list[float]:
        """Return the reduced value of each client's last epoch that has one."""
        over = self.total / self.total.new_tensor(self.weights) if self.reduce == "mean" else self.total
        found = zip(over.tolist(), self.weights, self.earlier, strict=True)
        return [now if weight else before for now, weight, before in found]


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
    _entries: dict[str, _Entry] = field(default_factory=dict)

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
            NotStackable: If the value is no number or tensor of one number, or is reduced otherwise than by mean, sum,
                minimum or maximum.
        """
        reduce = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if isinstance(value, (int, float)):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor) or reduce not in _REDUCTIONS:
            kind = (
                f"the object `{type(value).__name__}`" if reduce in _REDUCTIONS else "a value with its own `reduce_fx`"
            )
            raise NotStackable(f"logs {kind} as {name!r}")
        on_step, on_epoch = True if on_step is None else on_step, False if on_epoch is None else on_epoch
        tensor, dim = functorch.unwrap(value, self.level) if functorch.is_batched(value) else (value, None)
        size = self.samples() if batch_size is None else batch_size
        self.pending.append(
            Logged(name, tensor.clone(), dim, on_step, on_epoch, reduce, size, torch.get_default_dtype())
        )

    @contextmanager
    def aside(self) -> Iterator[list[Logged]]:
        """Receive what is logged within the context, such as by a second pass over a batch, in a list of its own.

        Yields:
            The list.
        """
        before, self.pending = self.pending, []
        try:
            yield self.pending
        finally:
            self.pending = before

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
        self.pending.clear()
        self.samples = _one  # which lets go of the batch, so that the next one takes its memory

    def _record(self, logged: Logged) -> None:
        count, value = self.high - self.low, logged.value
        if logged.dim is None:
            value = value.expand(count, *value.shape)
        values = value if value.dim() == 1 else (value.movedim(logged.dim, 0) if logged.dim else value).flatten()
        if values.numel() != count:
            raise NotStackable(f"logs a tensor of several numbers as {logged.name!r}")
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(logged.dtype)
        entry = self._entries.get(logged.name)
        if entry is None:
            entry = self._entries[logged.name] = self._entry(logged, values)
        elif (entry.on_step, entry.on_epoch, entry.reduce) != (logged.on_step, logged.on_epoch, logged.reduce):
            raise NotStackable(f"logs {logged.name!r} with other options than before")
        entry.logged[self.low : self.high] = [True] * count
        if entry.on_step or not entry.on_epoch:
            entry.newest[self.low : self.high] = values
        if entry.on_epoch:
            self._reduce(entry, values, logged.batch_size)

    def _entry(self, logged: Logged, values: Tensor) -> _Entry:
        newest = values.new_zeros(self.size)
        total = newest.new_full((self.size,), _STARTS.get(logged.reduce, 0.0))
        total = total.to(torch.promote_types(total.dtype, logged.dtype))  # as Lightning's results
        never, missing = [False] * self.size, [math.nan] * self.size
        return _Entry(logged.on_step, logged.on_epoch, logged.reduce, total, [0] * self.size, newest, never, missing)

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

    def start_epoch(self) -> None:
        """Begin the values of an epoch."""
        for entry in self._entries.values():
            entry.earlier = entry.reduced()
            entry.total.fill_(_STARTS.get(entry.reduce, 0.0))
            entry.weights = [0] * self.size

    def metrics(self) -> list[dict[str, float]]:
        """Return the last value of each key for each client, as `trainer.callback_metrics` has them after a fit."""
        found: list[dict[str, float]] = [{} for _ in range(self.size)]
        for name, entry in self._entries.items():
            values = zip(found, entry.logged, entry.newest.tolist(), entry.reduced(), strict=True)
            for metrics, logged, newest, reduced in values:
                if not logged:
                    continue
                if entry.on_step and entry.on_epoch:
                    metrics |= {name: reduced, f"{name}_step": newest, f"{name}_epoch": reduced}
                else:
                    metrics[name] = reduced if entry.on_epoch else newest
        return found


@dataclass
class EvaluationLog(StackedLog):
    """Receiver of `self.log` in a validation or test step for several clients, which also takes metric objects."""

    pending_objects: list[tuple[str, Metric]] = field(default_factory=list)
    """Metric objects that the step that runs has logged, by key."""
    _objects: dict[str, tuple[Metric, list[bool]]] = field(default_factory=dict)
    """Metric objects by key, and whether each client has logged them."""

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
        if not on_epoch:
            return  # an evaluation returns values of epochs only
        if isinstance(value, Metric):
            self.pending_objects += [(key, value) for key in ((name, f"{name}_epoch") if on_step else (name,))]
            return
        super().log(name, value, prog_bar, logger, bool(on_step), on_epoch, *args, **options)

    @contextmanager
    def aside(self) -> Iterator[list[Logged]]:
        """Receive what is logged within the context in lists of its own; see :meth:`StackedLog.aside`."""
        before, self.pending_objects = self.pending_objects, []
        try:
            with super().aside() as pending:
                yield pending
        finally:
            self.pending_objects = before

    def collect(self) -> None:
        """Record what the step has logged; see :meth:`StackedLog.collect`."""
        super().collect()
        for key, metric in self.pending_objects:
            _, logged = self._objects.setdefault(key, (metric, [False] * self.size))
            logged[self.low : self.high] = [True] * (self.high - self.low)
        self.pending_objects.clear()

    def results(self, compute: Callable[[Metric, Sequence[bool]], list[float]]) -> list[dict[str, float]]:
        """Return the value of each key for each client, as an evaluation returns them.

        Args:
            compute: Function of a metric object, and of whether each client has logged it, that returns its value for
                each client.
        """
        found = self.metrics()
        for name, entry in self._entries.items():
            if entry.on_step:
                for metrics in found:
                    metrics.pop(f"{name}_step", None)
        for name, (metric, logged) in self._objects.items():
            for metrics, value, has in zip(found, compute(metric, logged), logged, strict=True):
                if has:
                    metrics[name] = value
        return found


_REDUCTIONS = ("mean", "sum", "min", "max", "amin", "amax")
_STARTS = {"min": float("inf"), "amin": float("inf"), "max": float("-inf"), "amax": float("-inf")}
