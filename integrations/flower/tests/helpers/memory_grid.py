"""Flower's grid without processes: each node is a function in this one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Error, Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from lightning_sparsefl_flower.records import from_records, to_records

Answer = Callable[[Sequence[bytes]], list[bytes]]


class Silent(Exception):
    """A node that never answers."""


class MemoryGrid(Grid):
    """Grid whose nodes answer at once; each has a key of its own."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[bytes, Answer]] = {}
        self.replies: dict[str, Message] = {}
        self.requests: list[tuple[str, int, list[bytes]]] = []
        self._numbers = itertools.count(1)

    def add(self, answer: Answer, key: bytes | None = None) -> int:
        """Bring a node online, and return its number."""
        number = next(self._numbers)
        self.nodes[number] = (key or f"key {number}".encode(), answer)
        return number

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=number, public_key=key) for number, (key, _) in self.nodes.items()]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        identifier = f"message {next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = identifier
        node, parts = message.metadata.dst_node_id, from_records(message.content)
        self.requests.append((message.metadata.message_type, node, parts))
        try:
            content = self.nodes[node][1](parts)
        except Silent:
            return identifier
        except Exception as error:
            self.replies[identifier] = Message(Error(code=2, reason=str(error)), reply_to=message)
        else:
            self.replies[identifier] = Message(to_records(content), reply_to=message)
        return identifier

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(identifier) for identifier in list(message_ids) if identifier in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError
