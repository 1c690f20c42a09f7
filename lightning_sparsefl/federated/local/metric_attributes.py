"""Attributes of a metric that are not states, so that ``Metric.reset`` does not reset them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, SumMetric

from lightning_sparsefl.sparse.containers import ContainerStates

_OF_METRICS = frozenset({*vars(SumMetric()), "forward", "reset"}) - SumMetric()._defaults.keys()
"""Attributes that torch and torchmetrics set, and methods that a stack replaces."""


def own_attributes(metric: Metric) -> dict[str, Any]:
    """Return the attributes that a metric's class sets and that are not states, such as those of a running maximum.

    Args:
        metric: Metric.

    Example:
        >>> from torchmetrics import MinMaxMetric
        >>> sorted(own_attributes(MinMaxMetric(SumMetric())).items())
        [('max_val', tensor(-inf)), ('min_val', tensor(inf))]
    """
    found = vars(metric)
    return {key: found[key] for key in found.keys() - _OF_METRICS - metric._defaults.keys()}


class MetricAttributes:
    """Snapshot of a metric's own attributes, with what is in their tensors, lists, dicts and sets.

    Args:
        metric: Metric.

    Example:
        >>> from torchmetrics import MinMaxMetric
        >>> metric = MinMaxMetric(SumMetric())
        >>> before = MetricAttributes(metric)
        >>> _ = metric(3.0)
        >>> before.restore()
        >>> metric.max_val
        tensor(-inf)
    """

    def __init__(self, metric: Metric) -> None:
        self._metric, self._before = metric, own_attributes(metric)
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._containers = ContainerStates()
        for key, value in self._before.items():
            self._containers.add(value, key)
            if isinstance(value, Tensor) and not value.is_inference():
                self._tensors.append((value, value._version, value.detach().clone()))

    def restore(self) -> None:
        """Restore the snapshot."""
        now = vars(self._metric)
        for key in own_attributes(self._metric).keys() - self._before.keys():
            del now[key]
        now.update(self._before)
        for value, version, content in self._tensors:
            if value._version != version:
                with torch.no_grad():
                    value.copy_(content)
        self._containers.restore()
