"""A node in another process, which gets orders and sends answers as bytes through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.exchange.encoding import decode_answer, encode_order
from lightning_sparsefl.federated.local.wire_node import answer_bytes, on_device


@contextmanager
def forking() -> Iterator[None]:
    """Leave out the warning of Python 3.12 about forks of a process with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class NodeStore:
    """A node's own records, in versions by round; the only thing that it keeps from one order to the next."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[int, Any]] = {}

    def get(self, client: int, version: int) -> Any:
        """Return a record of a client, or None."""
        return self.versions.get(client, {}).get(version)

    def put(self, client: int, packed: Any, version: int, keep: Any) -> None:
        """Add a record of a client, and leave out those that nobody asks for."""
        versions = {**self.versions.get(client, {}), version: packed}
        wanted = {version, *(max((v for v in versions if v <= at), default=None) for at in keep)}
        self.versions[client] = {v: record for v, record in versions.items() if v in wanted}


def _serve(run: Any, pipe: Any) -> None:
    """Answer the orders that arrive, with the algorithm's client hooks, the module and the data."""
    run.node.records = store = NodeStore()
    run.server = run.coordinator = run.scorer = run.cohort = run.server_records = run.node_records = None
    commands: dict[str, Any] = {
        "answer": lambda payload: next(answer_bytes(run.node, [payload]))[0],
        "records": lambda _: {client: versions[max(versions)] for client, versions in store.versions.items()},
        "forget": lambda client: store.versions.pop(client, None) and None,
    }
    while True:
        name, value = pipe.recv()
        try:
            pipe.send((None, commands[name](value)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((f"{type(error).__name__}: {error}", None))
            os._exit(1)


class Remote:
    """The parent's end: takes the place of the rank's node and of its records.

    Args:
        run: Run whose node is forked.
    """

    def __init__(self, run: Any) -> None:
        self.codec, self.device, self.data = run.node.codec, run.device, run.data
        self.pipe, child = multiprocessing.Pipe()
        with forking():
            self.process = os.fork()
        if not self.process:
            _serve(run, child)
        child.close()
        self.bytes: list[tuple[str, bytes]] = []

    def ask(self, name: str, value: Any = None) -> Any:
        """Send a command to the node, and return its answer.

        Raises:
            ChildProcessError: If the node failed, with its error.
        """
        self.pipe.send((name, value))
        error, answer = self.pipe.recv()
        if error is not None:
            raise ChildProcessError(f"the node in the other process failed with {error}")
        return answer

    def answer(self, orders: Any) -> Iterator[Any]:
        """Yield the node's answers to orders."""
        self.data.client_train_dataloader = None  # the parent keeps the pooled set, and no client's
        for order in orders:
            known = order.message.masks if order.held is not None else None
            self.bytes.append((order.task, encode_order(order, self.codec, known)))
            answer = decode_answer(self.ask("answer", self.bytes[-1][1]), self.codec, order.message)
            update = None if answer.update is None else on_device(answer.update, self.device)
            yield type(answer)(**{**vars(answer), "update": update})

    def fetch(self, versions: Any, plan: Any) -> None:
        """Do nothing: the records never leave the node."""

    def settle(self, made: Any) -> None:
        """Do nothing: the node has kept them already."""

    def close(self) -> None:
        """End the node's process."""
        self.pipe.close()
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)


@contextmanager
def piped() -> Iterator[list[Remote]]:
    """Make runs work through a pipe; yield the list of their ends, to which each run adds its own."""
    remotes: list[Remote] = []
    connect = Run._connect

    def with_a_pipe(self: Any) -> None:
        connect(self)
        remotes.append(Remote(self))
        self.cohort.node = self.cohort.records = remotes[-1]

    with mock.patch.object(Run, "_connect", with_a_pipe):
        try:
            yield remotes
        finally:
            for remote in remotes:
                remote.close()
