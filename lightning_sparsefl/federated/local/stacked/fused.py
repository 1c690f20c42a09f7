"""The choice of fused kernels, which read and write weights, gradients and an optimizer's state once a step.

The other kernels of SGD go over all tensors up to four times a step, and those of Adam more than ten times, which the
caches of a CPU hold for one client and not for a stack. The last bits may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

_KINDS = (SGD, Adam, AdamW)


def may_be_fused(optimizer: Any) -> bool:
    """Return whether an optimizer has a fused kernel, and the user has left the choice of its kernel open.

    Args:
        optimizer: Optimizer of the module.
    """
    groups = optimizer.param_groups
    chosen = any(group.get(name) is not None for group in groups for name in ("fused", "foreach"))
    further = any(group.get(name) for group in groups for name in ("differentiable", "capturable"))
    return type(optimizer) in _KINDS and not chosen and not further


def choose_kernel(optimizer: Any) -> None:
    """Choose the kernel of the next step, for each group of an optimizer that :func:`may_be_fused`.

    Args:
        optimizer: Optimizer of leaves that have their gradients.
    """
    for group in optimizer.param_groups:
        group["fused"] = _is_fused(group, optimizer.state) or None


def _is_fused(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Return whether the fused kernel gains time and does what the others do."""
    one_pass = not group.get("momentum", True) and not group["weight_decay"]  # of plain SGD
    if one_pass or any(isinstance(rate, Tensor) for rate in (group["lr"], *group.get("betas", ()))):
        return False
    stepped = [leaf for leaf in group["params"] if leaf.grad is not None]
    states = [state.get(leaf, {}) for leaf in stepped]
    if len({not own for own in states}) > 1:  # a fused step of SGD is the first one of all tensors, or of none
        return False
    return all(_is_walked(leaf, own) for leaf, own in zip(stepped, states, strict=True))


def _is_walked(leaf: Tensor, state: Mapping[str, Any]) -> bool:
    """Return whether the numbers of a leaf, its gradient and its state lie in memory in one order, without gaps."""
    shape, strides = leaf.shape, leaf.stride()
    kept = [value for value in state.values() if isinstance(value, Tensor)]
    for value in (leaf.grad, *(value for value in kept if value.shape == shape)):
        if (
            value is None
            or value.is_sparse
            or (value.stride() != strides and order_in_memory(value) != order_in_memory(leaf))
        ):
            return False
    counts = all(value.dtype is torch.float32 for value in kept if value.shape != shape)  # as the kernel reads
    return counts and leaf.device.type == "cpu" and (leaf.is_contiguous() or _has_no_gaps(leaf))


def order_in_memory(tensor: Tensor) -> list[int]:
    """Return the strides of a tensor without those of dimensions of length 1, which are free.

    Args:
        tensor: Tensor of any layout.
    """
    return [step for length, step in zip(tensor.shape, tensor.stride(), strict=True) if length > 1]


def _has_no_gaps(leaf: Tensor) -> bool:
    """Return whether a tensor takes as much memory as its numbers, in any order of its dimensions."""
    return 1 + sum((length - 1) * step for length, step in zip(leaf.shape, leaf.stride(), strict=True)) == leaf.numel()
