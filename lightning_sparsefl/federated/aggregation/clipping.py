"""Clipping of updates, which bounds the influence of each client on the model."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.aggregation.reducers import changes_of, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import Message, Update, Weights

_LESS = 1 - 2.0**-50
"""Largest factor of a repeated scaling, which rounding cannot make 1, so that it ends."""
_ROUNDING = 1e-4
"""Relative tolerance of a norm for rounding to the dtype of the weights."""


def clipped(update: Update, message: Message, limit: float, layout: Layout) -> Update:
    """Return the update as a difference from the received weights, scaled down if its norm exceeds the limit.

    The norm is the Euclidean norm over all coordinates of parameters that the update votes on. The metric
    ``update_norm`` is its value before clipping. Buffers and `extra` trees are not changed.

    Args:
        update: Update of the client, before it is sent.
        message: Message that the client received.
        limit: Maximum norm.
        layout: Layout of the model.

    Raises:
        InvalidUpdate: If the client did not receive a tensor of the update, so that its difference is undefined.
    """
    moved, votes = changes_of(update, message, "federation.clip_update"), _votes_on_sent(update, message)

    def norm_of(tree: Weights) -> float:
        return _norm({name: w for name, w in apply(tree, votes).items() if name not in layout.buffers})

    norm = now = norm_of(moved)
    whole, factor = moved, 1.0
    while now > limit:  # again where rounding increases it, as that of float16 does below 2**-14
        factor *= min(limit / now, _LESS)
        moved = {n: w if n in layout.buffers else _scale_down(w, factor) for n, w in whole.items()}
        now = norm_of(moved)
    return replace(update, weights=moved, kind="difference", metrics={**update.metrics, "update_norm": norm})


def require_norm(update: Update, message: Message, limit: float, layout: Layout) -> None:
    """Raise :class:`InvalidUpdate` if the norm of an update exceeds the limit.

    Args:
        update: Update as the server received it.
        message: Message that the client received.
        limit: Maximum Euclidean norm, computed as in :func:`clipped`.
        layout: Layout of the model.
    """
    moved = apply(changes_of(update, message, "federation.clip_update"), _votes_on_sent(update, message))
    norm = _norm({name: tensor for name, tensor in moved.items() if name not in layout.buffers})
    if not norm <= limit * (1 + _ROUNDING):
        raise InvalidUpdate(f"its norm is {norm:.6g}; expected at most `federation.clip_update` = {limit:g}")


def _votes_on_sent(update: Update, message: Message) -> dict[str, torch.Tensor]:
    """Return the votes on the tensors of the update."""
    return {name: vote for name, vote in voted(update, message).items() if name in update.weights}


def _scale_down(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale a tensor by slightly less than `factor`, so that the norm stays within the limit after rounding."""
    return weight * (factor * (1 - torch.finfo(weight.dtype).eps))


def _norm(weights: Weights) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(w, dtype=torch.float64)) for w in weights.values()))
