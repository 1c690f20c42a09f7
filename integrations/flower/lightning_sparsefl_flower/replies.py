"""The kinds of requests to a node, and a node's reply to an order: an encoded answer, or why it was refused."""

from __future__ import annotations

HELLO, ORDERS, SECURE = b"hello", b"orders", b"secure"
_ANSWER, _REFUSAL = b"A", b"R"
_MOST_CHARACTERS = 500


class Refused(ValueError):
    """A node has refused an order; the message is a clause with the reason."""


def answered(answer: bytes) -> bytes:
    """Return the reply that holds an answer.

    Args:
        answer: Encoded answer.
    """
    return _ANSWER + answer


def refused(reason: str) -> bytes:
    """Return the reply to an order that the node does not carry out.

    Args:
        reason: Reason, as a clause.
    """
    return _REFUSAL + reason[:_MOST_CHARACTERS].encode()


def opened(reply: bytes) -> bytes:
    """Return the encoded answer of a reply.

    Args:
        reply: Bytes from :func:`answered` or :func:`refused`.

    Raises:
        Refused: If the reply holds a refusal instead.
    """
    if reply[:1] == _ANSWER:
        return reply[1:]
    reason = reply[1:][: 4 * _MOST_CHARACTERS].decode(errors="replace") if reply[:1] == _REFUSAL else "no reason given"
    raise Refused(reason)
