"""What happens to floating-point buffers, such as the running means of batch norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Message, Shared, Update

Mode = Literal["average", "local", "server"]


def insert_local_buffers(message: Message, own: Shared, layout: Layout) -> Message:
    """The message with the client's own buffers in place of the server's; those need not be sent.

    Args:
        message: From the server.
        own: What the client kept of its buffers; empty unless ``local``.
        layout: Of the model.
    """
    if not own:
        return message
    weights = {n: own[n] if n in layout.buffers else w for n, w in message.weights.items()}
    return replace(message, weights=weights)


def drop_local_buffers(
    update: Update, message: Message, mode: Mode, layout: Layout
) -> tuple[Update, Mapping[str, Tensor] | None]:
    """The update without the buffers that are not averaged, and those that the client keeps.

    Args:
        update: From the client.
        message: What it had received.
        mode: The option `federation.buffers`.
        layout: Of the model.
    """
    if mode == "average" or not layout.buffers:
        return update, None
    weights = {n: w for n, w in update.weights.items() if n not in layout.buffers}
    if mode == "server":
        return replace(update, weights=weights), None
    kept = {n: w for n, w in update.weights.items() if n in layout.buffers}
    if update.kind == "difference":
        kept = {n: w + message.weights[n] for n, w in kept.items()}
    return replace(update, weights=weights), kept
