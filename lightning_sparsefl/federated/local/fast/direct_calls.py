"""The optimizer's and autograd's work without the bookkeeping around it, which takes as long as a small model's step.

Each function does what torch's public method does, with the same bits, and calls that method itself where it would do
more: if hooks are registered, if a scheduler has replaced `step`, and for optimizers that are not
torch's. `tests/federated/local/test_direct_calls.py` compares both. The private names of torch in use are
`_execution_engine.run_backward`, the lists of hooks of an ``Optimizer``, and the `__wrapped__` of its `step`; where one
is missing, the public method is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_ONE = torch.ones(())
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(torch_optimizer, name, None) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)


def run_backward(loss: Tensor) -> None:
    """Add the gradients of a loss to its parameters, as ``loss.backward()`` does.

    Args:
        loss: Loss, with a single number unless its own class says how to differentiate it.
    """
    if _ENGINE is None or type(loss) is not Tensor or loss.dtype is not _ONE.dtype or loss.dim() or loss.is_cuda:
        loss.backward()
        return
    _ENGINE.run_backward((loss,), (_ONE,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def zero_gradients(optimizer: Optimizer) -> None:
    """Set all gradients to None, as ``optimizer.zero_grad()`` does.

    Args:
        optimizer: Optimizer of the module.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def step_optimizer(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Take one step, as ``optimizer.step(closure)`` does.

    Args:
        optimizer: Optimizer of the module.
        closure: Function that computes the loss and its gradients; None if they are there.
    """
    state = vars(optimizer)
    bare = _bare_step(type(optimizer))  # type: ignore[arg-type]  # a class is hashable
    if bare is None or "step" in state or any(map(state.get, _HOOKS)) or any(_GLOBAL_HOOKS):
        optimizer.step(closure)
    else:
        bare(optimizer, closure)


@functools.cache
def _bare_step(kind: type[Optimizer]) -> Callable[..., Any] | None:
    """Return `step` of one of torch's optimizers without the layer that profiles it and calls hooks, or None."""
    step = kind.__dict__.get("step")
    known = kind.__module__.startswith("torch.optim.") and getattr(step, "hooked", False) and None not in _GLOBAL_HOOKS
    return getattr(step, "__wrapped__", None) if known else None
