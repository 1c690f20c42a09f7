"""Scores of the batches of a loader, from which several processes make the score of the whole loader.

A pass adds up what its batches log and what they add to the metrics. Here each batch starts from zero, and its values
are added afterwards in the order of the batches: the same additions, so the same bits as of one pass in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sparsefl.federated.local.fast.divisible import JOINED, Indivisible
from lightning_sparsefl.federated.local.metric_attributes import MetricAttributes

State: TypeAlias = Tensor | list[Tensor]
"""State of a metric: a tensor, or tensors that are concatenated."""

_ADDED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Logged:
    """What a batch has logged under one key."""

    rule: Literal["mean", "sum", "max", "min", "metric"]
    """How the values of the batches become one."""
    value: Tensor | str
    """Value, in a mean times its weight; of a metric, its name in the module."""
    weight: Tensor | None = None
    """Number of samples, in a mean."""


@dataclass(frozen=True)
class BatchScore:
    """What one batch adds to a score."""

    logged: Mapping[str, Logged]
    """Logged values by key."""
    states: Mapping[str, tuple[int, Mapping[str, State]]]
    """Number of updates and states of each metric that the batch has updated, by its name in the module."""


@dataclass(frozen=True)
class PartScore:
    """What one process contributes to a score."""

    batches: Sequence[BatchScore] = ()
    """Scores of consecutive batches."""
    indivisible: str | None = None
    """Why only one process can compute the score; None = the parts make it."""


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics of a module by their names in it.

    Args:
        module: Module.
    """
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def batch_score(results: Mapping[str, _ResultMetric], metrics: Mapping[str, Metric]) -> BatchScore:
    """Return what a batch has logged and what it has added to the metrics, which were reset before it.

    Args:
        results: Logged values of the batch.
        metrics: Metrics of the module by name.

    Raises:
        Indivisible: If the score is not the sum of such parts.
    """
    states = {}
    for name, metric in metrics.items():
        if metric._computed is not None:
            raise Indivisible(f"a step reads the value of the metric `{name}`")
        if metric._update_count > 1 and any(_rounds(getattr(metric, key)) for key in metric._defaults):
            raise Indivisible(f"a step updates the metric `{name}` several times")
        if metric._update_count:
            states[name] = (metric._update_count, {key: _on_cpu(getattr(metric, key)) for key in metric._defaults})
    return BatchScore({result.meta.name: _logged(result) for result in results.values()}, states)


def _rounds(state: State) -> bool:
    """Return whether sums of a state depend on their order."""
    return isinstance(state, Tensor) and state.is_floating_point()


def _on_cpu(state: State) -> State:
    return [part.cpu() for part in state] if isinstance(state, list) else state.cpu()


def _logged(result: _ResultMetric) -> Logged:
    meta = result.meta
    if meta.on_step or not meta.on_epoch:
        raise Indivisible(f"`{meta.name}` is logged for each step")
    if not result.is_tensor:
        return Logged("metric", meta.metric_attribute or "")
    if result._update_count > 1:
        raise Indivisible(f"a step logs `{meta.name}` several times")
    if meta.is_mean_reduction:
        return Logged("mean", result.value.cpu(), result.cumulated_batch_size.cpu())
    rules = {"sum": meta.is_sum_reduction, "max": meta.is_max_reduction, "min": meta.is_min_reduction}
    for rule, applies in rules.items():
        if applies:
            return Logged(rule, result.value.cpu())  # type: ignore[arg-type]
    raise Indivisible(f"`{meta.name}` is logged with a reduction of its own")


def join_scores(module: LightningModule, parts: Iterable[PartScore]) -> dict[str, float]:
    """Return the metrics of a whole loader.

    Args:
        module: Module that was evaluated; its metrics are reset.
        parts: Scores of consecutive parts of the loader, in the order of the batches.

    Returns:
        The value of each logged key.

    Raises:
        Indivisible: If the parts do not make the score.
    """
    logged: dict[str, Logged] = {}
    metrics = metrics_of(module)
    kept = [MetricAttributes(metric, module) for metric in metrics.values()]
    for metric in metrics.values():
        metric.reset()
    for part in parts:
        if part.indivisible is not None:
            raise Indivisible(part.indivisible)
        for batch in part.batches:
            for name, item in batch.logged.items():
                logged[name] = _added(name, logged[name], item) if name in logged else item
            for name, (updates, states) in batch.states.items():
                _add_states(metrics[name], updates, states)
    values = {name: _value(name, item, metrics) for name, item in logged.items()}
    for metric, before in zip(metrics.values(), kept, strict=True):
        metric.reset()
        before.restore()
    return values


def _added(name: str, total: Logged, item: Logged) -> Logged:
    if total.rule != item.rule:
        raise Indivisible(f"`{name}` is logged in several ways")
    if isinstance(total.value, str) or isinstance(item.value, str):
        return total
    if total.weight is not None and item.weight is not None:
        return Logged("mean", total.value + item.value, total.weight + item.weight)
    return Logged(total.rule, _ADDED[total.rule](total.value, item.value))


def _add_states(metric: Metric, updates: int, states: Mapping[str, State]) -> None:
    metric._update_count += updates
    for name, state in states.items():
        total = getattr(metric, name)
        if isinstance(state, list):
            total.extend(part.to(metric.device) for part in state)
        else:
            setattr(metric, name, JOINED[metric._reductions[name]](total, state.to(metric.device)))


def _value(name: str, item: Logged, metrics: Mapping[str, Metric]) -> float:
    value = metrics[item.value].compute() if isinstance(item.value, str) else item.value
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise Indivisible(f"`{name}` is no single number")
    return float(value if item.weight is None else value / item.weight)
