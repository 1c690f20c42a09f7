"""Training step that changes nothing besides gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_sparsefl.callbacks.object_states import LARGE_TENSOR, ObjectStates
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.attributes import slots_of
from lightning_sparsefl.sparse.containers import LARGE, ContainerStates, fill
from lightning_sparsefl.sparse.modes import random_restored

_OF_MODULES = frozenset(vars(LightningModule()))
"""Attributes that every module has."""


def copy_of(batch: Any, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a copy of a batch, for a training step that may write into it, or take something out of it.

    Args:
        batch: Tensors in nested lists, tuples, mappings and dataclasses. Of an object of another class the copy shares
            the tensors, and of what cannot be copied all.
        memo: Originals with their copies, by the identity of the original. Default: none yet.

    Example:
        >>> batch = {"x": torch.zeros(2), "y": [torch.ones(1)]}
        >>> copy_of(batch).pop("x").add_(1), batch
        (tensor([1., 1.]), {'x': tensor([0., 0.]), 'y': [tensor([1.])]})
    """
    memo = {} if memo is None else memo
    if id(batch) not in memo:
        copied = batch.clone() if isinstance(batch, Tensor) else _copy_of_container(batch, memo)
        memo[id(batch)] = (batch, copied)
    return memo[id(batch)][1]


def _copy_of_container(batch: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(batch, tuple):
        parts = [copy_of(part, memo) for part in batch]
        try:
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        except Exception:  # the class has other arguments
            return batch
    if not (isinstance(batch, (list, Mapping)) or is_dataclass(batch)):
        return batch
    try:
        copied: Any = copy.copy(batch)  # with the attributes of a class derived from `list` or `dict`
    except Exception:  # of a class whose own methods raise
        return batch
    memo[id(batch)] = (batch, copied)  # in which a part may refer to the whole
    for name, part in _parts(batch):
        own = copy_of(part, memo)
        try:
            if isinstance(batch, (list, dict)):
                copied[name] = own
            else:
                object.__setattr__(copied, name, own)
        except Exception:
            return batch
    return copied


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a container holds, with the positions, keys or names of attributes."""
    if isinstance(batch, list):
        return enumerate(batch)
    if isinstance(batch, dict):
        return list(batch.items())
    # a mapping of another class has its entries in an attribute, and a dataclass may have slots
    declared = [field.name for field in fields(batch)] if is_dataclass(batch) else []
    kind: Any = type(batch)
    names = dict.fromkeys([*getattr(batch, "__dict__", ()), *declared, *slots_of(kind)])
    return [(name, getattr(batch, name)) for name in names if hasattr(batch, name)]


def trial_loss(module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss that `training_step` returns for a copy of a batch, so that the batch stays as it is.

    Raises:
        InvalidOption: If it returns no loss.
    """
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    output = module.training_step(copy_of(batch), *((batch_idx,) if numbered else ()))
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise InvalidOption(f"`{type(module).__name__}.training_step` returned {loss!r} as loss; expected a tensor.")
    return loss


def first_samples(batch: Any, number: int = 2) -> Any:
    """Return the first samples of a batch whose leaves are tensors with equally many rows; other batches unchanged.

    Args:
        batch: Nested lists, tuples and mappings.
        number: Number of samples; two suffice for a step that mixes samples.

    Example:
        >>> first_samples([torch.arange(4), {"y": torch.arange(4)}])
        [tensor([0, 1]), {'y': tensor([0, 1])}]
        >>> first_samples([torch.arange(3), "name"])
        [tensor([0, 1, 2]), 'name']
    """
    rows = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in tree_leaves(batch)}
    if len(rows) != 1 or None in rows:
        return batch
    return apply_to_collection(batch, Tensor, lambda value: value[:number])


@contextmanager
def trial(module: LightningModule) -> Iterator[None]:
    """Disable logging, and restore attributes, buffers, metrics and random states (torch, NumPy, Python) afterwards.

    Attributes are restored with what they hold, such as tensors in lists, of which a step may have changed the numbers.
    """
    children = list(module.modules())
    attributes = [(child, type(child), dict(vars(child)), ContainerStates()) for child in children]
    held = ObjectStates(LARGE_TENSOR, most=LARGE, members=children)
    for child, _, own, containers in attributes:
        for name, value in own.items():
            if name in _OF_MODULES or isinstance(child, Metric):
                containers.add(value, name)
            else:
                held.visit(value, name)
        if isinstance(child, Metric):
            own |= _copied(child.metric_state)
    parts = [part for part in children if isinstance(part, LightningModule)]
    buffers = [
        (child, name, buffer, buffer.clone())
        for child in children
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    for part in parts:
        part.log = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        with isolate_rng(include_cuda=False), random_restored(module.parameters()):
            yield
    finally:
        for part in parts:
            del part.log
        with torch.no_grad():
            for child, name, buffer, value in buffers:
                buffer.copy_(value)
                child._buffers[name] = buffer  # which the step may have replaced
        for child, kind, own, containers in attributes:
            if type(child) is kind:  # no lazy layer, which the pass has initialized
                fill(vars(child), own)
                containers.restore()
        held.restore()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in state.items()}
