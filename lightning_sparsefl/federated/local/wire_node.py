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


def answer_bytes(node: Node, payloads: Sequence[bytes]) -> Iterator[tuple[bytes, BaseException | None]]:
    """Answer encoded orders by encoded answers.

    Args:
        node: Node that keeps its clients' masks.
        payloads: Orders as :func:`~lightning_sparsefl.federated.exchange.encoding.encode_order` made them.

    Yields:
        The answer to each order, and a client's error, which does not travel.

    Raises:
        MalformedPayload: If a payload is not an order for this model.
    """
    decoded = [_decoded(node, payload) for payload in payloads]
    answers = node.answer([order for order in decoded if isinstance(order, Order)])
    for order in decoded:
        if isinstance(order, Answer):
            yield encode_answer(order, node.codec, _NO_MESSAGE), None
        else:
            answer = next(answers)
            yield encode_answer(answer, node.codec, order.message), answer.error


def _decoded(node: Node, payload: bytes) -> Order | Answer:
    """Return an order; or the answer that this node has forgotten what the order was encoded against."""
    header, body = order_header(payload)
    known: Mapping[str, Tensor] | None = {}
    if header["held"] is not None:
        record = node.record(header["client"], header["version"])
        known = None if record is None else record.masks
        if known is None or digest(known) != header["held"]:
            asked = {name: header[name] for name in ("run", "client", "round", "task")}
            return Answer(**asked, num_examples=header["facts"]["num_examples"], forgot=True)
    order = decode_order(header, body, node.codec, known)
    return replace(order, message=on_device(order.message, node.device))


class WireNode:
    """Passes orders and answers to a node as bytes.

    Args:
        node: Node that keeps its clients' masks.
    """

    def __init__(self, node: Node) -> None:
        self.node = node

    def answer(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Carry out orders; see :meth:`Node.answer`."""
        known = [order.message.masks if order.held is not None else None for order in orders]
        payloads = [encode_order(order, self.node.codec, masks) for order, masks in zip(orders, known, strict=True)]
        for order, (payload, error) in zip(orders, answer_bytes(self.node, payloads), strict=True):
            answer = decode_answer(payload, self.node.codec, order.message)
            update = None if answer.update is None else on_device(answer.update, self.node.device)
            yield replace(answer, update=update, error=error)


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
