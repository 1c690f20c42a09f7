"""What `self.log` records for several clients: one vector for each key, in the arithmetic of Lightning's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.leaves import unwrapped


class NotStackable(Exception):
    """A training step does something that has no meaning for several clients at once; the text is a clause."""


@dataclass
class _Entry:
    """Values of one key."""

    on_step: bool
    on_epoch: bool
    reduce: str
    total: Tensor
    weight: Tensor
    newest: Tensor


@dataclass
class StackedLog:
    """Receiver of `self.log` in a training step for several clients.

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
    batch_size: int = 1
    """Number of samples of each client in the step that runs."""
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
        *_: Any,
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
        values = unwrapped(value, self.level, self.high - self.low).detach().flatten()
        if len(values) != self.high - self.low:
            raise NotStackable(f"logs a tensor of several numbers as {name!r}")
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(torch.get_default_dtype())
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = self._entry(on_step, on_epoch, reduce, values)
        rows = slice(self.low, self.high)
        entry.newest[rows] = values
        if on_epoch:
            self._reduce(entry, rows, values, self.batch_size if batch_size is None else batch_size)

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Record several values; the arguments are those of :meth:`lightning.pytorch.LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def _entry(self, on_step: bool, on_epoch: bool, reduce: str, values: Tensor) -> _Entry:
        newest = values.new_zeros(self.size)
        total = newest.new_full((self.size,), _STARTS.get(reduce, 0.0))
        total = total.to(torch.promote_types(total.dtype, torch.get_default_dtype()))  # as Lightning's results
        return _Entry(on_step, on_epoch, reduce, total, newest.new_zeros(self.size), newest)

    @staticmethod
    def _reduce(entry: _Entry, rows: slice, values: Tensor, batch_size: int) -> None:
        if entry.reduce == "mean":
            entry.total[rows] += values * batch_size
        elif entry.reduce == "sum":
            entry.total[rows] += values
        else:
            chosen = torch.minimum if entry.reduce.endswith("min") else torch.maximum
            entry.total[rows] = chosen(entry.total[rows], values)
        entry.weight[rows] += batch_size

    def start_epoch(self) -> None:
        """Begin the values of an epoch."""
        for entry in self._entries.values():
            entry.total.fill_(_STARTS.get(entry.reduce, 0.0))
            entry.weight.zero_()

    def metrics(self) -> list[dict[str, float]]:
        """Return the last value of each key for each client, as `trainer.callback_metrics` has them after a fit."""
        found: list[dict[str, float]] = [{} for _ in range(self.size)]
        for name, entry in self._entries.items():
            last = entry.newest.tolist()
            over = (entry.total / entry.weight if entry.reduce == "mean" else entry.total).tolist()
            for metrics, newest, reduced in zip(found, last, over, strict=True):
                if entry.on_step and entry.on_epoch:
                    metrics |= {name: reduced, f"{name}_step": newest, f"{name}_epoch": reduced}
                else:
                    metrics[name] = reduced if entry.on_epoch else newest
        return found


_REDUCTIONS = ("mean", "sum", "min", "max", "amin", "amax")
_STARTS = {"min": float("inf"), "amin": float("inf"), "max": float("-inf"), "amax": float("-inf")}
