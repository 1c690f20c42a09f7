"""Orders and answers as bytes: a JSON header, then the message or the update as the wire codec encodes it.

The ledger charges the message or the update. The header, of some hundred bytes, is not charged.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias, get_args

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order, Split, Task
from lightning_sparsefl.types import Masks, Message
from lightning_sparsefl.wire import Codec, Size

_LENGTH = 4
_MOST_HEADER_BYTES = 2**20
_MOST_SCORES = 256
"""Most metrics of a split in an answer."""
_LIMIT = 2**63
"""Bound of whole numbers, which stores keep in 64 bits."""

_Checks: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By name of a field: whether a value from JSON fits, and what is expected of it in a message."""


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LIMIT)


def is_text(value: Any) -> bool:
    r"""Return whether a value is a string that can be written: JSON has escapes for halves of characters.

    Args:
        value: Value from JSON.

    Example:
        >>> is_text("loss"), is_text("\ud800"), is_text(1)
        (True, False, False)
    """
    return type(value) is str and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_optional_text(value: Any) -> bool:
    return value is None or is_text(value)


def _is_version(value: Any) -> bool:
    return value is None or _is_whole(value)


def _is_task(value: Any) -> bool:
    return value in get_args(Task)


def _are_rounds(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_splits(value: Any) -> bool:
    known = get_args(Split)
    return isinstance(value, list) and all(split in known for split in value) and len(value) == len(set(value))


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= set(get_args(Split)) and all(map(_is_table, value.values()))


def _is_table(value: Any) -> bool:
    fits = isinstance(value, dict) and len(value) <= _MOST_SCORES
    return fits and all(map(is_text, value)) and all(map(_is_number, value.values()))


def _is_size(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and value.keys() == {"total", "masks"} and all(map(_is_whole, value.values()))


def _is_size_of(size: Mapping[str, int] | None, total: int) -> bool:
    """Return whether a stated size is that of so many bytes; None for an answer without an update."""
    return total == 0 if size is None else 0 < total == size["total"] >= size["masks"]


_WHOLE = (_is_whole, "a whole number from 0 to 2^63 - 1")
_TEXT = (is_text, "a string")
_OPTIONAL_TEXT = (_is_optional_text, "a string or null")
_VERSION = (_is_version, "a whole number from 0 to 2^63 - 1, or null")
_FACTS: _Checks = {
    "num_examples": _WHOLE,
    "capacity": (lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]"),
    "max_rounds": _WHOLE,
    "monitor": _TEXT,
    "local_epochs": (lambda value: value is None or _is_whole(value, 1), "a whole number from 1 to 2^63 - 1, or null"),
}
_COMMON: _Checks = {
    "run": _TEXT,
    "client": _WHOLE,
    "round": _WHOLE,
    "task": (_is_task, f"one of {get_args(Task)}"),
    "version": _VERSION,
}
_ORDER: _Checks = {
    **_COMMON,
    "facts": (lambda value: isinstance(value, dict), "the facts of a client"),
    "key": _TEXT,
    "splits": (_are_splits, f"a list of different ones of {get_args(Split)}"),
    "held": _OPTIONAL_TEXT,
    "keep": (_are_rounds, "a list of whole numbers from 0 to 2^63 - 1"),
}
_ANSWER: _Checks = {
    **_COMMON,
    "num_examples": _WHOLE,
    "scores": (_are_scores, f"at most {_MOST_SCORES} numbers by name for some of {get_args(Split)}"),
    "up": (_is_size, "the size of an update, or null"),
    "elapsed": (lambda value: _is_number(value) and 0 <= value < math.inf, "a finite number >= 0"),
    "failure": _OPTIONAL_TEXT,
    "forgot": (lambda value: type(value) is bool, "true or false"),
}


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
        MalformedPayload: If the header is not that of an order, with exactly its names and values in their ranges.
    """
    header, body = _parts(payload)
    _require_fields("The order", header, _ORDER)
    _require_fields("An order's `facts`", header["facts"], _FACTS)
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
    _require_fields("The answer", header, _ANSWER)
    up = header.pop("up")
    if not _is_size_of(up, len(body)):
        raise MalformedPayload(f"The answer states an update of the size {up!r}, and holds {len(body)} bytes.")
    update = codec.decode_update(body, message) if body else None
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


def _require_fields(what: str, values: Mapping[str, Any], checks: _Checks) -> None:
    """Raise :class:`MalformedPayload` unless there are exactly the expected names, each with a value that fits."""
    if values.keys() != checks.keys():
        raise MalformedPayload(f"{what} has the names {reprlib.repr(sorted(values))}; expected {sorted(checks)}.")
    for name, (fits, expected) in checks.items():
        if not fits(values[name]):  # `reprlib` bounds the length and the depth of what is shown
            raise MalformedPayload(f"{what} has the `{name}` {reprlib.repr(values[name])}; expected {expected}.")
