"""Whether a pass over a loader is a sum over its batches, so that several processes can share them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_sparsefl.data.examples import reads_all_in_order
from lightning_sparsefl.federated.local.fast.support import STEPS, overridden
from lightning_sparsefl.federated.local.isolation import OF_LIGHTNING
from lightning_sparsefl.federated.local.metric_attributes import own_attributes

JOINED: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
}
"""How two states of a metric become one, by the reduction that the metric names for several processes."""

_LARGE = 2**20
"""Number of elements from which on an array is not compared, so that data in attributes costs nothing."""


class Indivisible(Exception):
    """A pass that only one process can do; the message is a clause with the reason."""


def check_divisible(module: LightningModule, loader: Any) -> None:
    """Raise :class:`Indivisible` unless a pass over a loader is known to be a sum over its batches.

    Args:
        module: Module to evaluate.
        loader: Loader of labelled batches.
    """
    name, hooks = type(module).__name__, sorted(overridden(module) - STEPS)
    if hooks:
        raise Indivisible(f"`{name}` overrides `{hooks[0]}`")
    if not reads_all_in_order(loader) or loader.num_workers:
        raise Indivisible("its loader is not a plain `DataLoader` of all samples in sequential order without workers")
    for place, child in module.named_modules():
        if isinstance(child, MetricCollection) and child._enable_compute_groups:
            raise Indivisible(f"`{name}.{place}` is a `MetricCollection` with compute groups")
        if isinstance(child, Metric) and not _adds_up(child):
            raise Indivisible(f"the states of the metric `{name}.{place}` are not known to add up")


def _adds_up(metric: Metric) -> bool:
    """Return whether the states of a metric after some batches follow from its states after each of them."""
    wraps = any(isinstance(child, Metric) for child in metric.children())
    if wraps or metric.full_state_update or not metric.compute_with_cache:
        return False
    return all(_joins(metric._defaults[name], rule) for name, rule in metric._reductions.items())


def _joins(default: Tensor | list[Tensor], rule: Any) -> bool:
    if isinstance(default, list):
        return rule in (None, dim_zero_cat)
    return rule in JOINED and (rule is not dim_zero_sum or not bool(default.any()))


def batches_of(loader: DataLoader[Any], first: int, last: int) -> DataLoader[Any]:
    """Return a loader of some consecutive batches of a loader that :func:`check_divisible` accepts.

    Args:
        loader: Loader of all batches.
        first: Index of the first batch.
        last: Index after the last batch.
    """
    size: int = loader.batch_sampler.batch_size  # type: ignore[union-attr]
    examples = range(first * size, min(last * size, len(loader.dataset)))  # type: ignore[arg-type]
    return DataLoader(
        loader.dataset,
        batch_sampler=BatchSampler(examples, size, drop_last=False),
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )


class Traces:
    """What a step could pass on to later batches: attributes of the module, and the state of random generators.

    Args:
        module: Module that is evaluated.
        device: Device of the module.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._before = self._found()

    def check(self) -> None:
        """Raise :class:`Indivisible` if something has changed."""
        for (owner, value, detail), (_, now, detail_now) in zip(self._before, self._found(), strict=False):
            if value is not now or detail != detail_now:
                raise Indivisible(f"a step changes {owner}")

    def _found(self) -> list[tuple[str, Any, Any]]:
        """Return names, objects, and what changes inside them."""
        found: list[tuple[str, Any, Any]] = [("the state of a random generator", None, _generators(self._device))]
        for place, child in self._module.named_modules():
            kept = dict(child._buffers) | _own(child)
            found.append((f"the attributes of {place or 'the module'}", None, sorted(kept)))
            for key, value in sorted(kept.items()):
                found.append((f"`{f'{place}.{key}'.lstrip('.')}`", value, _detail(value)))
        return found


def _own(child: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that neither Lightning nor torchmetrics uses itself."""
    if isinstance(child, Metric):
        return own_attributes(child)
    used = OF_LIGHTNING | {"_state_is_copy"} if isinstance(child, MetricCollection) else OF_LIGHTNING
    return {key: value for key, value in vars(child).items() if key not in used}


def _detail(value: Any) -> Any:
    """Return something that changes when a value is changed in place: of containers, numbers and identities in them."""
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size < _LARGE else 0
    if isinstance(value, dict):
        return [(key, _content(item)) for key, item in value.items()]
    return [_content(item) for item in value] if isinstance(value, (list, set, deque)) else 0


def _content(item: Any) -> Any:
    if isinstance(item, (bool, int, float, str)):
        return item
    return (id(item), item._version if isinstance(item, Tensor) and not item.is_inference() else 0)


def _generators(device: torch.device) -> list[Any]:
    name, keys, *rest = np.random.get_state()
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [random.getstate(), name, bytes(keys), rest, *(bytes(state.numpy()) for state in states)]  # type: ignore[arg-type]
