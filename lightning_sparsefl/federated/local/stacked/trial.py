"""Trial that finds before a run whether a module's clients can be stacked, and says why not.

Two clients with different weights take a step of plain gradient descent, alone and stacked. Their weights, which then
differ from the first ones by the gradients, their buffers and their logged values must agree. What has no meaning for
several clients at once, such as reading a number out of a tensor, raises in the stacked step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.federated.local.stacked.logs import NotStackable

_CLAUSES = (
    (r"\.item\(\)", "reads a number out of a tensor (`.item()`, `float()`, `int()`)"),
    (r"data-dependent control flow|bool\(\)", "branches on the value of a tensor"),
    (
        r"autograd.Function with functorch",
        "uses an `autograd.Function` without a batched form (`generate_vmap_rule = True` gives it one)",
    ),
    (r"inplace|in-place|match the broadcast shape", "writes in place into a tensor that all clients share"),
    (r"Batching rule not implemented for ([\w:.]+)", "uses `{}`, which has no batched form"),
    (r"dynamic shape|nonzero|masked_select|data-dependent", "makes tensors whose shape depends on values"),
    (r"numpy|storage", "leaves torch (`.numpy()`)"),
)
"""Patterns of the errors of ``torch.func``, and clauses that say what a training step does to cause them."""

TOLERANCE = 2e-3
"""Largest difference of two results, relative to the largest number of the tensor."""


def reason_of(error: Exception) -> str:
    """Return what a training step does to cause an error when stacked, as a clause.

    Args:
        error: Error of a stacked step.

    Example:
        >>> reason_of(RuntimeError("vmap: It looks like you're calling .item() on a Tensor."))
        'reads a number out of a tensor (`.item()`, `float()`, `int()`)'
    """
    text = str(error)
    if isinstance(error, NotStackable):
        return text
    for pattern, clause in _CLAUSES:
        found = re.search(pattern, text)
        if found:
            return clause.format(*found.groups())
    first = text.splitlines()[0][:120] if text else ""
    return f"fails for several clients at once ({type(error).__name__}: {first})"


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str | None:
    """Return what differs between two results of a step, as a clause, or None.

    Args:
        ours: Tensors by name after a stacked step.
        theirs: The same after the step of a client alone.
        before: The same before the step.
    """
    for name, tensor in theirs.items():
        change = tensor - before[name]
        scale = TOLERANCE * float(change.abs().max()) + 1e-5 * float(tensor.abs().max()) + 1e-12
        if not bool(((ours[name] - tensor).abs() <= scale).all()):
            return f"changes `{name}` otherwise for several clients at once than for one"
    return None


def gradient_descent(module: Any) -> Any:
    """Return the optimizer of the trial, whose steps show the gradients.

    Args:
        module: Module of the user.
    """
    return torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=1.0)


class TrialOptimizer:
    """Context in which a module configures plain gradient descent, and random layers are off.

    Args:
        module: Module of the user.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes: list[tuple[nn.Module, bool]] = []

    def __enter__(self) -> None:
        vars(self._module)["configure_optimizers"] = MethodType(gradient_descent, self._module)
        dropouts = (nn.modules.dropout._DropoutNd,)
        self._modes = [(child, child.training) for child in self._module.modules() if isinstance(child, dropouts)]
        for child, _ in self._modes:
            child.training = False

    def __exit__(self, *_: Any) -> None:
        vars(self._module).pop("configure_optimizers", None)
        for child, mode in self._modes:
            child.training = mode
