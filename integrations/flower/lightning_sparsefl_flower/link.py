"""Requests to nodes through Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from lightning_sparsefl_flower.records import from_records, to_records
from lightning_sparsefl_flower.registry import name_of

T = TypeVar("T")
_GRACE = 30.0
"""Seconds that the SuperLink keeps a message longer than the server waits, so that the server gives the reason."""
_SERVER_ERROR = 500
_TRIALS = 10
"""Number of times that the SuperLink is asked again; one with a database on disk may be busy."""


class Unanswered(str):
    """Why a node has not answered, as a clause."""


class Link:
    """Sends requests to nodes, and waits for the replies.

    Args:
        grid: Flower's grid.
        poll: Seconds between two looks for replies.
        check: Function that is called at each look, and raises if the run is to stop.
    """

    def __init__(self, grid: Grid, poll: float = 1.0, check: Callable[[], None] = lambda: None) -> None:
        self.grid, self.poll, self.check = grid, poll, check

    def nodes(self) -> dict[int, str]:
        """Return the name of the key of each node that is online."""
        return {node.node_id: name_of(node.public_key) for node in self._tried(self.grid.get_nodes)}

    def exchange(
        self,
        kind: str,
        requests: Mapping[int, Sequence[bytes]],
        timeout: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, list[bytes] | Unanswered]:
        """Send one request to each node.

        Args:
            kind: Type of Flower's messages.
            requests: Request by node.
            timeout: Seconds to wait for the replies; one that comes later is dropped.
            meanwhile: Work to do while the nodes work.

        Returns:
            By node, its reply, or the reason why it did not reply.
        """
        sent = {self._push(node, kind, parts, timeout): node for node, parts in requests.items()}
        meanwhile()
        replies: dict[int, list[bytes] | Unanswered] = {}
        until = time.monotonic() + timeout
        while waiting := {message for message, node in sent.items() if message is not None and node not in replies}:
            self.check()
            for reply in self._tried(partial(self.grid.pull_messages, waiting)):
                node = sent.get(reply.metadata.reply_to_message_id)
                if node is not None:
                    replies[node] = _content(reply)
            if time.monotonic() > until:
                break
            if len(replies) < len(sent):
                time.sleep(self.poll)
        missing = Unanswered(f"its node has not answered within {timeout:g} s (`timeout`)")
        return {node: replies.get(node, missing) for node in requests}

    def _push(self, node: int, kind: str, parts: Sequence[bytes], timeout: float) -> str | None:
        """Send one message, and forget its content; return its identifier, or None if it was not accepted."""
        message = Message(to_records(parts), node, kind, ttl=timeout + _GRACE)
        return next(iter(self._tried(lambda: self.grid.push_messages([message]))), None)

    def _tried(self, ask: Callable[[], Iterable[T]], trial: int = 1) -> list[T]:
        """Return what the SuperLink says, which a busy one may refuse for a while."""
        try:
            return list(ask())
        except httpx.HTTPStatusError as error:
            if trial == _TRIALS or error.response.status_code < _SERVER_ERROR:
                raise
            print(f"The SuperLink says {error.response.status_code}; asking again.", flush=True)
        time.sleep(trial * self.poll)
        return self._tried(ask, trial + 1)


def _content(reply: Message) -> list[bytes] | Unanswered:
    if reply.has_error():
        return Unanswered(f"its node failed (Flower's error {reply.error.code}: {str(reply.error.reason)[:200]})")
    try:
        return from_records(reply.content)
    except ValueError as error:
        return Unanswered(f"its node sent something else ({error})")
