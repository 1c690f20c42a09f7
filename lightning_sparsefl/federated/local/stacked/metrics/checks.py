"""The checks that metric objects make of values, in a form for several clients.

Metrics of torchmetrics branch on values, which has no meaning for several clients at once: aggregators, such as
``MeanMetric``, look for NaN, and classification metrics, unless they have ``validate_args=False``, for labels out of
range. Here each client has a flag instead, which such a value sets. Clients of a stack with a flag are trained or
evaluated again, one after another, where the metric itself removes or reports the value.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator

from lightning_sparsefl.federated.local.stacked.logs import NotStackable

_CLASSIFICATION = "torchmetrics.classification."


class ValueCheck(ABC):
    """Flag of the client that uses a metric object: whether it has given the object a value that a check looks for.

    Args:
        metric: Metric object.

    Attributes:
        flag: Boolean tensor of shape ().

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> check = check_of(metric)
        >>> vars(metric).update(check.replaced())
        >>> metric.update(torch.tensor([1.0, torch.nan]))
        >>> check.flag, metric.mean_value
        (tensor(True), tensor(nan))
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.flag = torch.zeros((), dtype=torch.bool, device=metric.device)
        self._defaults = {"flag": self.flag}

    def note(self, found: Tensor) -> None:
        """Set the flag if any entry of a boolean tensor is true.

        Args:
            found: Whether the check looks for a value, for each of them.
        """
        self.flag = self.flag | found.any()

    @abstractmethod
    def replaced(self) -> dict[str, Any]:
        """Return the attributes of the metric object that replace its check."""


class _NaNCheck(ValueCheck):
    """Flag of an aggregator for NaN."""

    def replaced(self) -> dict[str, Any]:
        return {"_cast_and_nan_check_input": self._cast}

    def _cast(self, x: Any, weight: Any = None) -> tuple[Tensor, Tensor]:
        metric: Any = self._metric
        value, weight = (
            each if isinstance(each, Tensor) else torch.as_tensor(each, dtype=metric.dtype, device=metric.device)
            for each in (x, 1.0 if weight is None else weight)
        )
        self.note(value.isnan())
        self.note(weight.isnan())
        return value.to(metric.dtype), weight.expand_as(value).to(metric.dtype)


class _LabelCheck(ValueCheck):
    """Flag of a classification metric for labels out of range; types and shapes are those of all clients.

    Args:
        metric: Metric object.
        classes: Number of classes.
    """

    def __init__(self, metric: Metric, classes: int) -> None:
        super().__init__(metric)
        self._classes, self._update = classes, metric.update
        self._is_classification = any(each.__module__.startswith(_CLASSIFICATION) for each in type(metric).__mro__)
        self._many = any(each.__name__.startswith("Multiclass") for each in type(metric).__mro__)

    def replaced(self) -> dict[str, Any]:
        return {"validate_args": False, "update": self._checked}

    def _fit(self, preds: Tensor, target: Tensor) -> bool:
        """Return whether predictions and labels may pass the checks of types and shapes of classification metrics."""
        if target.is_floating_point():
            return False
        if preds.shape == target.shape:
            return not (self._many and preds.is_floating_point())
        if not (self._many and preds.is_floating_point() and preds.dim() > 1):
            return False
        return (*preds.shape[:1], *preds.shape[2:]) == tuple(target.shape)

    def _checked(self, preds: Tensor, target: Tensor) -> None:
        if self._is_classification and not self._fit(preds, target):
            name = type(self._metric).__name__
            raise NotStackable(f"gives `{name}` predictions and labels whose types or shapes do not fit")
        for labels, ignored in ((preds, None), (target, getattr(self._metric, "ignore_index", None))):
            if not labels.is_floating_point():
                found = (labels < 0) | (labels >= self._classes)
                self.note(found if ignored is None else found & (labels != ignored))
        self._update(preds, target)


def check_of(metric: Metric) -> ValueCheck | None:
    """Return the check of values that a metric object makes, in a form for several clients; None if it makes none.

    Args:
        metric: Metric object.
    """
    if isinstance(metric, BaseAggregator):
        is_own = type(metric)._cast_and_nan_check_input is not BaseAggregator._cast_and_nan_check_input
        return None if is_own or metric.nan_strategy == "disable" else _NaNCheck(metric)
    classes = _classes_of(metric) if getattr(metric, "validate_args", False) else None
    return None if classes is None else _LabelCheck(metric, classes)


def _classes_of(metric: Any) -> int | None:
    """Return the number of classes of a classification metric's labels; None for other metrics."""
    kind = type(metric)
    if list(inspect.signature(kind.update).parameters) != ["self", "preds", "target"]:
        return None
    if getattr(metric, "num_labels", None) or any(each.__name__.startswith("Binary") for each in kind.__mro__):
        return 2
    return getattr(metric, "num_classes", None)
