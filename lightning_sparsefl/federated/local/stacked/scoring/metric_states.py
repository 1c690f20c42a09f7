"""The states of metric objects for several clients at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.leaves import unwrapped
from lightning_sparsefl.federated.local.stacked.logs import NotStackable


class _Slot(NamedTuple):
    """One state of one metric object."""

    table: dict[str, Any]
    """Attributes of the metric object."""
    key: str
    first: Tensor
    """State of the metric object itself, which it gets back."""
    states: Tensor
    """States of all clients."""
    default: Tensor
    """State after a reset, as `forward` of the metric object makes one; the object gets it back, too."""


class MetricStates:
    """Sums and counts in the metric objects of a module, with the clients in dimension 0.

    Args:
        module: Module of the user, whose metric objects are reset.
        size: Number of clients.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size = size
        self._metrics = {
            name: child for name, child in module.named_modules() if isinstance(child, Metric) and child._defaults
        }
        self._slots: list[_Slot] = []
        for metric in self._metrics.values():
            table = vars(metric)  # in which `setattr` of a metric puts its states, too, after many questions
            for key, default in metric._defaults.items():
                if isinstance(default, Tensor):  # a list is checked when something was appended to it
                    states = table[key].expand(size, *table[key].shape).clone()
                    self._slots.append(_Slot(table, key, table[key], states, default))

    def rows(self, low: int, high: int) -> list[Tensor]:
        """Return views of the states of the clients from `low` to before `high`.

        Args:
            low: First client.
            high: Client after the last one.
        """
        return [slot.states[low:high] for slot in self._slots]

    @contextmanager
    def shown(self, rows: Sequence[Tensor], level: int) -> Iterator[None]:
        """Give the metric objects the states of some clients within the context, and write the states back afterwards.

        Args:
            rows: States of the clients, as :meth:`rows` returns them.
            level: Number of the level of ``vmap``; 0 outside of one, for a single client.
        """
        for (table, key, *_, default), own in zip(self._slots, rows, strict=True):
            table[key] = functorch.wrap(own, 0, level) if level else own[0].clone()
            if level:  # so that `update` may add in place to what a reset gives
                table["_defaults"][key] = functorch.wrap(default.expand(len(own), *default.shape), 0, level)
        try:
            yield
            for (table, key, *_), own in zip(self._slots, rows, strict=True):
                own.copy_(unwrapped(table[key], level, len(own)))
            self._require_sums()
        finally:
            for table, key, first, _, default in self._slots:
                table[key], table["_defaults"][key] = first, default
            for metric in self._metrics.values():
                vars(metric).update(_computed=None, _forward_cache=None)

    @property
    def updates(self) -> list[int]:
        """Number of updates of each metric object, whose :meth:`compute` warns where there was none."""
        return [metric._update_count for metric in self._metrics.values()]

    @updates.setter
    def updates(self, counts: Sequence[int]) -> None:
        for metric, count in zip(self._metrics.values(), counts, strict=True):
            metric._update_count = count

    def _require_sums(self) -> None:
        for name, metric in self._metrics.items():
            for key, default in metric._defaults.items():
                if isinstance(default, list) and getattr(metric, key):
                    raise NotStackable(f"updates the metric object `self.{name}`, which keeps all samples")

    def compute(self, metric: Metric, logged: Sequence[bool]) -> list[float]:
        """Return the value of a metric object for each client.

        The values are computed at once where each operation has a batched form, which depends on the version of torch,
        and else one by one.

        Args:
            metric: Metric object of the module.
            logged: Whether each client has logged it; the value of one that has not has no meaning.
        """
        try:
            with functorch.vmap_level(self.size) as level, self.shown(self.rows(0, self.size), level):
                value = unwrapped(metric.compute(), level, self.size)
        except RuntimeError:  # of `torch.func`, or of the user's code, which then raises it again
            return [self._value(metric, place) if has else math.nan for place, has in enumerate(logged)]
        _require_one_number(metric, value.ndim - 1)
        found: list[float] = value.tolist()
        return found

    def _value(self, metric: Metric, place: int) -> float:
        """Return the value of a metric object for the client at a place of the stack."""
        with self.shown(self.rows(place, place + 1), 0):
            value = torch.as_tensor(metric.compute())
        _require_one_number(metric, value.ndim)
        return float(value)


def _require_one_number(metric: Metric, dimensions: int) -> None:
    if dimensions:
        raise NotStackable(f"logs the object `{type(metric).__name__}`, whose value is not one number")
