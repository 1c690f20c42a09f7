"""Floating-point buffers, such as the running means of batch norm, that clients keep (`federation.buffers`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Message, Update, Weights

Mode = Literal["average", "local", "server"]
"""Whether buffers are averaged by number of samples, kept by each client, or never changed."""


def without_local_buffers(message: Message, mode: Mode, layout: Layout) -> Message:
    """Return the message to send: with `local` and `server`, without floating-point buffers.

    Args:
        message: Message from the algorithm.
        mode: Option `federation.buffers`.
        layout: Layout of the model.
    """
    if mode == "average" or not layout.buffers.intersection(message.weights):
        return message
    return replace(message, weights={n: w for n, w in message.weights.items() if n not in layout.buffers})


def insert_local_buffers(message: Message, own: Weights, initial: Weights, mode: Mode, layout: Layout) -> Message:
    """Return the message with the client's own buffers, or the initial ones if it has none yet.

    Args:
        message: Message as received.
        own: Buffers from the client's last round; empty in its first round.
        initial: Initial weights of the run.
        mode: Option `federation.buffers`.
        layout: Layout of the model.
    """
    if mode == "average" or not layout.buffers or not message.weights:
        return message
    buffers = {name: own.get(name, initial[name]) for name in layout.names if name in layout.buffers}
    return replace(message, weights={**message.weights, **buffers})


def drop_local_buffers(update: Update, message: Message, mode: Mode, layout: Layout) -> tuple[Update, Weights]:
    """Split an update into the part to send and the buffers that the client keeps.

    Args:
        update: Update from the algorithm.
        message: Message with the client's buffers inserted.
        mode: Option `federation.buffers`.
        layout: Layout of the model.
    """
    if mode == "average" or not layout.buffers:
        return update, {}
    weights = {n: w for n, w in update.weights.items() if n not in layout.buffers}
    if mode == "server":
        return replace(update, weights=weights), {}
    kept: Mapping[str, Tensor] = {n: w for n, w in update.weights.items() if n in layout.buffers}
    if update.kind == "difference":
        kept = {n: w + message.weights[n] for n, w in kept.items()}
    return replace(update, weights=weights), kept
