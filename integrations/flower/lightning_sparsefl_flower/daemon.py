"""The node's daemon: the clients' half of a run, in a process that the node's operator starts."""

from __future__ import annotations

import os
import socket
import stat
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sparsefl.errors import SparseFLError
from lightning_sparsefl.federated.exchange.encoding import order_header
from lightning_sparsefl.federated.exchange.failures import failure_reason
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.federated.local.wire_node import answer_bytes

from lightning_sparsefl_flower.frames import receive, send
from lightning_sparsefl_flower.hello import Hello, agreement
from lightning_sparsefl_flower.node_records import DiskRecords
from lightning_sparsefl_flower.replies import HELLO, ORDERS, SECURE, answered, refused
from lightning_sparsefl_flower.secure_link import take_step
from lightning_sparsefl_flower.secure_sum.node import KeepingNode, SecureNode

_PATIENCE = 60.0
"""Seconds that a connection may be silent."""


class Daemon:
    """Answers the requests of a server.

    Args:
        node: Node of this process.
        records: Records of its clients.
        sizes: Number of training samples of each client of this node.
        facts: Facts that the server must share.
        secure: Keeps the clients' updates and takes part in sums of them; None = updates are sent one by one.
    """

    def __init__(
        self,
        node: Node,
        records: DiskRecords,
        sizes: Mapping[int, int],
        facts: Mapping[str, str],
        secure: SecureNode | None = None,
    ) -> None:
        self.node, self.records, self.secure = node, records, secure
        self.hello, self._agreement = Hello(sizes, facts), agreement(facts)

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Answer a request; whatever it holds, the daemon goes on.

        Args:
            request: The kind of the request; with orders, the digest of the facts and the encoded orders.

        Returns:
            The hello, or one reply for each order.
        """
        kind, *rest = request or [b""]
        if kind == HELLO:
            return [self.hello.encode()]
        if kind not in (ORDERS, SECURE) or not rest:
            return [refused(f"a request of the unknown kind {bytes(kind[:20])!r}")]
        agreed, *orders = rest
        if agreed != self._agreement:
            return [refused("this node has other facts than at its hello; it was restarted") for _ in orders]
        if kind == SECURE:
            return self._steps(*orders)
        return [self._guarded(partial(self._reply, order)) for order in orders]

    @property
    def _answering(self) -> Any:
        return self.node if self.secure is None else KeepingNode(self.node, self.secure)

    def _steps(self, step: bytes = b"", *requests: bytes) -> list[bytes]:
        """Let clients take a step in a secure sum."""
        if self.secure is None:
            return [self._refuse("this node takes part in no secure sums") for _ in requests]
        return [self._guarded(partial(take_step, self.secure, step, request)) for request in requests]

    def _guarded(self, reply: Callable[[], bytes]) -> bytes:
        """Return what a function replies; an error of it is a refusal."""
        try:
            return reply()
        except SparseFLError as refusal:  # no order or step for this model, or a mistake of the method
            return self._refuse(str(refusal))
        except Exception as error:
            traceback.print_exception(error)  # it cannot travel to the server
            return self._refuse(failure_reason(error))

    def _reply(self, order: bytes) -> bytes:
        header, _ = order_header(order)
        if header["client"] not in self.hello.sizes:
            return self._refuse(f"client {header['client']} is not on this node")
        self.records.enter(header["run"])
        ((answer, error),) = answer_bytes(self._answering, [order])
        if error is not None:
            print(f"sparsefl-node: client {header['client']} failed: {error!r}", flush=True)
        return answered(answer)

    def _refuse(self, reason: str) -> bytes:
        print(f"sparsefl-node: refused: {reason}", flush=True)
        return refused(reason)


def serve(path: Path, answer: Callable[[Sequence[bytes]], list[bytes]]) -> None:
    """Answer one request after another, of processes of this user only, until the process is ended.

    Args:
        path: Path of the Unix socket; an older socket there is replaced.
        answer: Function that answers a request.

    Raises:
        OSError: If the socket cannot be made.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        _bind(listening, path)
        print(f"sparsefl-node: ready at {path}", flush=True)
        while True:
            connection, _ = listening.accept()
            with connection, suppress(OSError):  # the process that asked may have ended
                connection.settimeout(_PATIENCE)
                send(connection, answer(receive(connection)))


def _bind(listening: socket.socket, path: Path) -> None:
    """Bind a socket that only this user may connect to, from its first moment on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink()
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen()
