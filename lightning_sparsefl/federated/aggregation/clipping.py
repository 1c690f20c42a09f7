"""Bounds how far one client can move the model."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.aggregation.reducers import voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import Message, Update, Weights


def clipped(update: Update, message: Message, limit: float, layout: Layout) -> Update:
    """The update as a difference from what was received, made shorter where its norm exceeds the limit.

    The norm is the Euclidean one over all coordinates of parameters that the update votes on. It is reported as the
    metric ``update_norm``, as it was before. Buffers and `extra` trees pass as they are.

    Args:
        update: As the client would send it.
        message: What it had received.
        limit: Largest norm.
        layout: Of the model.

    Raises:
        InvalidUpdate: If a tensor was not received, so that nobody knows how far it moved.
    """
    moved = _difference(update, message)
    norm = _norm({n: w for n, w in apply(moved, _within(update, message)).items() if n not in layout.buffers})
    if norm > limit:
        moved = {n: w if n in layout.buffers else _shorter(w, limit / norm) for n, w in moved.items()}
    return replace(update, weights=moved, kind="difference", metrics={**update.metrics, "update_norm": norm})


def _difference(update: Update, message: Message) -> Weights:
    if update.kind == "difference":
        return update.weights
    unknown = [name for name in update.weights if name not in message.weights]
    if unknown:
        raise InvalidUpdate(
            f"`federation.clip_update` bounds how far a client moves what it received, and {unknown[0]!r} was not sent "
            "to it; send it (`download`), or set `federation.clip_update: null`."
        )
    return {name: value - message.weights[name] for name, value in update.weights.items()}


def _within(update: Update, message: Message) -> dict[str, torch.Tensor]:
    """The votes on what was sent."""
    return {name: vote for name, vote in voted(update, message).items() if name in update.weights}


def _shorter(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Shorter by a hair than asked for, so that what is rounded up stays within the limit."""
    return weight * (factor * (1 - torch.finfo(weight.dtype).eps))


def _norm(weights: Weights) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(w, dtype=torch.float64)) for w in weights.values()))
