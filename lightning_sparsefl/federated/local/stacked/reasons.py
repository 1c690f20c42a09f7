"""Why clients cannot be stacked, in the words of what a user's code does."""

from __future__ import annotations

import re

from lightning_sparsefl.federated.exchange.failures import in_brief
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules import LEAVES_TORCH, READS_NUMBER

_CLAUSES = (
    (r"requires_grad", "sets `requires_grad` of a tensor"),
    (r"accessing `data`", "uses `data` of a tensor"),
    (r"\.item\(\)", READS_NUMBER),
    (r"allclose", "compares tensors (`torch.allclose`)"),
    (r"data-dependent control flow|bool\(\)", "branches on the value of a tensor"),
    (
        r"autograd.Function with functorch",
        "uses an `autograd.Function` without a batched form (`generate_vmap_rule = True` gives it one)",
    ),
    (r"modified by an inplace operation", "writes into a tensor that the backward pass needs"),
    (r"inplace|in-place|match the broadcast shape", "writes in place into a tensor that all clients share"),
    (r"Batching rule not implemented for ([\w:]+(?:\.\w+)*)", "uses `{}`, which has no batched form"),
    (r"dynamic shape|nonzero|masked_select|data-dependent", "makes tensors whose shape depends on values"),
    (r"numpy", LEAVES_TORCH),
    (r"storage", "copies a tensor as Python does (`copy.deepcopy`)"),
)
"""Patterns of the errors of ``torch.func``, and clauses that say what a training step does to cause them."""


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
    return f"fails for several clients at once ({in_brief(error)})"
