"""The choice of SGD's fused kernel, which reads and writes weights, gradients and momentum of a stack once a step.

SGD's own kernels go over all tensors once for the decay, twice for the momentum and once for the weights, which the
caches of a CPU hold for one client and not for a stack. The last bits of the two may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD


def may_be_fused(optimizer: Any) -> bool:
    """Return whether an optimizer is an SGD whose kernel the user has left open.

    Args:
        optimizer: Optimizer of the module.
    """
    options = ("fused", "foreach", "differentiable")
    return type(optimizer) is SGD and not any(group[name] for group in optimizer.param_groups for name in options)


def choose_kernel(optimizer: Any) -> None:
    """Choose the kernel of the next step, for each group of an optimizer that :func:`may_be_fused`.

    Args:
        optimizer: Optimizer of leaves that have their gradients.
    """
    for group in optimizer.param_groups:
        group["fused"] = _is_fused(group, optimizer.state) or None


def _is_fused(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Return whether the fused kernel gains time and does what the others do."""
    if not (group["momentum"] or group["weight_decay"]) or isinstance(group["lr"], Tensor):
        return False
    stepped = [leaf for leaf in group["params"] if leaf.grad is not None]
    buffers = [state[leaf].get("momentum_buffer") if leaf in state else None for leaf in stepped]
    if len({buffer is None for buffer in buffers}) > 1:  # it takes either the first step of all tensors or of none
        return False
    return all(_is_walked(leaf, buffer) for leaf, buffer in zip(stepped, buffers, strict=True))


def _is_walked(leaf: Tensor, buffer: Tensor | None) -> bool:
    """Return whether the numbers of a leaf, its gradient and momentum lie in memory in one order, without gaps."""
    others = [leaf.grad, leaf.grad if buffer is None else buffer]
    alike = all(o is not None and not o.is_sparse and o.stride() == leaf.stride() for o in others)
    span = 1 + sum((length - 1) * step for length, step in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.device.type == "cpu" and alike and span == leaf.numel()
