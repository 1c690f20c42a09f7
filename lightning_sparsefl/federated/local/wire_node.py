"""A node behind bytes: orders and answers are encoded and decoded on their way (`federation.wire: encode`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.federated.exchange.encoding import (
    decode_answer,
    decode_order,
    encode_answer,
    encode_order,
    order_header,
)
from lightning_sparsefl.federated.exchange.orders import Answer, Order
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.sparse.masks import digest
from lightning_sparsefl.types import Message

_NO_MESSAGE = Message(weights={})


def answer_bytes(node: Node, payload: bytes) -> bytes:
    """Answer one encoded order by an encoded answer.

    Args:
        node: Node that keeps its clients' masks.
        payload: Order as :func:`~lightning_sparsefl.federated.exchange.encoding.encode_order` made it.

    Raises:
        MalformedPayload: If the payload is not an order for this model.
    """
    header, body = order_header(payload)
    known: Mapping[str, Tensor] | None = {}
    if header["held"] is not None:
        record = node.record(header["client"], header["version"])
        known = None if record is None else record.masks
        if known is None or digest(known) != header["held"]:
            asked = {name: header[name] for name in ("run", "client", "round", "task")}
            forgot = Answer(**asked, num_examples=header["facts"]["num_examples"], forgot=True)
            return encode_answer(forgot, node.codec, _NO_MESSAGE)
    order = decode_order(header, body, node.codec, known)
    order = replace(order, message=on_device(order.message, node.device))
    (answer,) = node.answer([order])
    return encode_answer(answer, node.codec, order.message)


class WireNode:
    """Passes orders and answers to a node as bytes.

    Args:
        node: Node that keeps its clients' masks.
    """

    def __init__(self, node: Node) -> None:
        self.node = node

    def answer(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Carry out orders; see :meth:`Node.answer`."""
        for order in orders:
            known = order.message.masks if order.held is not None else None
            payload = answer_bytes(self.node, encode_order(order, self.node.codec, known))
            answer = decode_answer(payload, self.node.codec, order.message)
            update = None if answer.update is None else on_device(answer.update, self.node.device)
            yield replace(answer, update=update, error=self.node.error if answer.failure is not None else None)


def on_device(value: Any, device: torch.device) -> Any:
    """Return a decoded message or update with its tensors on a device.

    Args:
        value: A message or an update.
        device: Device to move the tensors to.
    """

    def move(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device)
        if isinstance(item, Mapping):
            return {key: move(part) for key, part in item.items()}
        return [move(part) for part in item] if isinstance(item, list) else item

    return replace(value, **{name: move(getattr(value, name)) for name in value.__dataclass_fields__})
