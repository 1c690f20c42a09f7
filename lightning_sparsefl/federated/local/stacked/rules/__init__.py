"""Rules of functions for several clients at once, faster than those of ``torch.vmap``.

``torch.vmap`` makes every function right for a batch of clients, but its rules for convolutions, pooling and norms copy
their inputs, and a call of an ``autograd.Function`` takes longer than a small layer. :class:`LayerRules` is active
within a level of ``vmap`` and takes these functions away from it: a rule looks through the wrapper, leaves the level,
computes with the plain tensors of all clients under ordinary autograd, and wraps the result. A function without a rule,
and a call that a rule does not know, is left to ``vmap``.

Images of S clients have the logical shape (B, S, C, H, W) with the clients in dimension 1, and lie in memory in the
order B, H, W, S, C. This is the layout ``channels_last`` of (B, S * C, H, W), so that a grouped convolution needs no
copy, and neither do pooling, norms and element-wise functions, which keep strides.

Weights that are the same for all clients are no batched tensors. A layer with such weights computes the samples of all
clients as those of one batch, and images before it keep the clients in dimension 0.
"""

from lightning_sparsefl.federated.local.stacked.rules import layers, tensors  # noqa: F401  # which register their rules
from lightning_sparsefl.federated.local.stacked.rules.copies import KernelCopies, address
from lightning_sparsefl.federated.local.stacked.rules.gradients import Gradients
from lightning_sparsefl.federated.local.stacked.rules.mode import (
    KEPT_ELSEWHERE,
    LEAVES_TORCH,
    READS_NUMBER,
    REMOVES_GRADIENT,
    FlatViews,
    LayerRules,
    OtherTensors,
    Rule,
    failing_alone,
    rule_for,
)
from lightning_sparsefl.federated.local.stacked.rules.tensors import BRANCHES

__all__ = [
    "BRANCHES",
    "KEPT_ELSEWHERE",
    "LEAVES_TORCH",
    "READS_NUMBER",
    "REMOVES_GRADIENT",
    "FlatViews",
    "Gradients",
    "KernelCopies",
    "LayerRules",
    "OtherTensors",
    "Rule",
    "address",
    "failing_alone",
    "rule_for",
]
