"""Attributes of a metric that are not states, so that ``Metric.reset`` does not reset them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchmetrics import Metric, SumMetric

from lightning_sparsefl.federated.local.tensor_contents import TensorContents
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
        module: Module that has the metric, whose parameters and buffers an attribute may hold too.

    Example:
        >>> from torchmetrics import MinMaxMetric
        >>> metric = MinMaxMetric(SumMetric())
        >>> before = MetricAttributes(metric, metric)
        >>> _ = metric(3.0)
        >>> before.restore()
        []
        >>> metric.max_val
        tensor(-inf)
    """

    def __init__(self, metric: Metric, module: nn.Module) -> None:
        self._metric, self._before = metric, own_attributes(metric)
        self._containers, self._contents = ContainerStates(), TensorContents(module)
        for key, value in self._before.items():
            self._contents.add(self._containers.add(value, key) or (), f"{type(metric).__name__}.{key}")

    def restore(self) -> list[str]:
        """Restore the snapshot; return the names of attributes whose numbers have changed and have no copy."""
        now = vars(self._metric)
        for key in own_attributes(self._metric).keys() - self._before.keys():
            del now[key]
        now.update(self._before)
        _, left = self._contents.restore()
        self._containers.restore()
        return left
