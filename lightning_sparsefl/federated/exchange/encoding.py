"""Orders and answers as bytes: a JSON header, then the message or the update as the wire codec encodes it.

The ledger charges the message or the update. The header, of some hundred bytes, is not charged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order, Split, Task
from lightning_sparsefl.types import Masks, Message
from lightning_sparsefl.wire import Codec, Size

_LENGTH = 4
_MOST_HEADER_BYTES = 2**20
_ORDER_FIELDS = {"run": str, "client": int, "round": int, "task": str, "key": str}
_MOST_SCORES = 256
"""Most metrics of a split in an answer."""
_ANSWER_FIELDS = {"run": str, "client": int, "round": int, "task": str, "num_examples": int, "forgot": bool}
_ANSWER_NAMES = {*_ANSWER_FIELDS, "scores", "elapsed", "version", "failure", "up"}


def encode_order(order: Order, codec: Codec, known: Masks | None = None) -> bytes:
    """Encode an order.

    Args:
        order: The order.
        codec: Codec of the run's model.
        known: Masks that the client holds, if `order.held` names them.
    """
    header = {name: value for name, value in vars(order).items() if name != "message"}
    return _join({**header, "facts": asdict(order.facts)}, codec.encode_message(order.message, known))


def order_header(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Split an encoded order into its header and the encoded message.

    Args:
        payload: Bytes that :func:`encode_order` made.

    Raises:
        MalformedPayload: If the header is not one of an order.
    """
    header, body = _parts(payload)
    _require_fields(header, _ORDER_FIELDS, get_args(Task))
    facts = header.get("facts")
    if not isinstance(facts, dict) or set(facts) != set(ClientFacts.__dataclass_fields__):
        raise MalformedPayload(f"The order has the facts {facts!r}; expected {list(ClientFacts.__dataclass_fields__)}.")
    _require_splits(header.get("splits"))
    return header, body


def decode_order(header: Mapping[str, Any], body: bytes, codec: Codec, known: Masks | None = None) -> Order:
    """Decode an order.

    Args:
        header: Header from :func:`order_header`.
        body: Encoded message from :func:`order_header`.
        codec: Codec of the run's model.
        known: Masks that the client holds, if the header's `held` names them.

    Raises:
        MalformedPayload: If the message cannot be decoded.
    """
    return Order(
        **{
            **header,
            "facts": ClientFacts(**header["facts"]),
            "splits": tuple(header["splits"]),
            "keep": tuple(header["keep"]),
        },
        message=codec.decode_message(body, known),
    )


def encode_answer(answer: Answer, codec: Codec, message: Message) -> bytes:
    """Encode an answer, without the error object and without the client's memory.

    Args:
        answer: The answer.
        codec: Codec of the run's model.
        message: Message of the order, which the update is encoded against.
    """
    left_out = ("update", "checked", "error")
    header = {name: value for name, value in vars(answer).items() if name not in left_out}
    size = None if answer.up is None else {"total": answer.up.total, "masks": answer.up.masks}
    body = b"" if answer.update is None else codec.encode_update(answer.update, message)
    return _join({**header, "up": size}, body)


def decode_answer(payload: bytes, codec: Codec, message: Message) -> Answer:
    """Decode an answer.

    Args:
        payload: Bytes that :func:`encode_answer` made.
        codec: Codec of the run's model.
        message: Message of the order.

    Raises:
        MalformedPayload: If the payload is not an answer, or states another size than it has.
    """
    header, body = _parts(payload)
    _require_fields(header, _ANSWER_FIELDS, get_args(Task))
    _require_splits(header.get("scores"))
    _require_answer(header)
    update = codec.decode_update(body, message) if body else None
    up = header.pop("up", None)
    if (up is None) is not (update is None) or (up is not None and not _is_size(up, len(body))):
        raise MalformedPayload(f"The answer states an update of the size {up!r}, and holds {len(body)} bytes.")
    return Answer(**header, update=update, up=None if up is None else Size(**up))


def _join(header: Mapping[str, Any], body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + body


def _parts(payload: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    if not _LENGTH < end <= min(len(payload), _LENGTH + _MOST_HEADER_BYTES):
        raise MalformedPayload(f"The payload of {len(payload)} bytes states a header that ends at byte {end}.")
    try:
        header = json.loads(payload[_LENGTH:end])
    except (ValueError, RecursionError) as error:
        raise MalformedPayload(f"The header is not JSON ({error}).") from error
    if not isinstance(header, dict):
        raise MalformedPayload(f"The header is a {type(header).__name__}; expected an object.")
    return header, payload[end:]


def _require_fields(header: Mapping[str, Any], types: Mapping[str, type], tasks: tuple[str, ...]) -> None:
    for name, kind in types.items():
        if type(header.get(name)) is not kind:
            raise MalformedPayload(f"The header has the `{name}` {header.get(name)!r}; expected a {kind.__name__}.")
    if header["task"] not in tasks:
        raise MalformedPayload(f"The header has the `task` {header['task']!r}; expected one of {tasks}.")


def _require_answer(header: Mapping[str, Any]) -> None:
    """Check the fields of an answer that are not in `_ANSWER_FIELDS`."""
    scores = header["scores"]
    found = {
        "names": set(header) == _ANSWER_NAMES,
        "num_examples": header["num_examples"] >= 0,
        "elapsed": _is_number(header.get("elapsed")) and 0 <= header["elapsed"] < math.inf,
        "version": header.get("version") is None or type(header["version"]) is int,
        "failure": header.get("failure") is None or type(header["failure"]) is str,
        "scores": isinstance(scores, dict) and all(_is_table(table) for table in scores.values()),
    }
    for name, fits in found.items():
        if not fits:
            raise MalformedPayload(f"The header of the answer has wrong `{name}`; expected those of an answer.")


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= _MOST_SCORES and all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_size(value: Any, total: int) -> bool:
    """Return whether a header's `up` is a size of so many bytes."""
    if not isinstance(value, dict) or set(value) != {"total", "masks"}:
        return False
    masks = value["masks"]
    return type(masks) is int and value["total"] == total and 0 <= masks <= total


def _require_splits(splits: Any) -> None:
    known = get_args(Split)
    if not isinstance(splits, list | dict) or any(split not in known for split in splits):
        raise MalformedPayload(f"The header names the splits {splits!r}; expected some of {known}.")
