"""Which node has which clients, and how many samples they have."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from lightning_sparsefl.errors import InvalidOption

from lightning_sparsefl_flower.hello import Hello, WrongHello
from lightning_sparsefl_flower.link import Link, Unanswered
from lightning_sparsefl_flower.registry import Registry
from lightning_sparsefl_flower.replies import HELLO

_SHOWN = 20
_PATIENCE = 120.0
"""Most seconds to wait for a hello."""


class Directory:
    """The nodes that have said hello, and their clients.

    Args:
        link: Link to the nodes.
        registry: Registry of the clients' keys.
        facts: Facts that a node must share.
        num_clients: Number of clients of the federation.
        most_examples: Largest number of training samples that a client may state.
        timeout: Seconds to wait for a hello.
    """

    def __init__(
        self,
        link: Link,
        registry: Registry,
        facts: Mapping[str, str],
        num_clients: int,
        most_examples: int,
        timeout: float,
    ) -> None:
        self.link, self.registry, self.facts = link, registry, facts
        self.num_clients, self.most_examples, self.timeout = num_clients, most_examples, timeout
        self.homes: dict[int, int] = {}
        """Node of each client."""
        self.sizes: dict[int, int] = {}
        """Number of training samples of each client, as it was at its first hello."""
        self._refusals: dict[int, str] = {}

    def wait(self) -> None:
        """Wait until each client of the federation is on a node.

        Raises:
            InvalidOption: If some are not within the timeout.
        """
        until, announced = time.monotonic() + self.timeout, [-1]
        self.look()
        while missing := [client for client in range(self.num_clients) if client not in self.homes]:
            if missing != announced:
                print(f"Waiting for nodes with the clients {_listed(missing)}.", flush=True)
            if time.monotonic() > until:
                raise InvalidOption(
                    f"No node has the clients {_listed(missing)} after {self.timeout:g} s; expected all "
                    f"{self.num_clients} clients on nodes (`timeout`). "
                    f"Refused: {list(self._refusals.values()) or 'no node'}."
                )
            announced = missing
            self.link.check()
            time.sleep(self.link.poll)
            self.look()

    def find(self, clients: Iterable[int]) -> None:
        """Look for new nodes once if one of these clients is on none.

        Args:
            clients: Numbers of clients.
        """
        if any(client not in self.homes for client in clients):
            self.look()

    def look(self) -> None:
        """Ask the nodes that are online and have no client here for their hello."""
        online = self.link.nodes()
        self.homes = {client: node for client, node in self.homes.items() if node in online}
        new, patience = sorted(set(online) - set(self.homes.values())), min(self.timeout, _PATIENCE)
        for node, reply in self.link.exchange("query", {node: [HELLO] for node in new}, patience).items():
            self._meet(node, online[node], reply)

    def _meet(self, node: int, key: str, reply: list[bytes] | Unanswered) -> None:
        try:
            self._welcome(node, key, reply)
        except WrongHello as error:
            self._refuse(node, str(error))

    def _welcome(self, node: int, key: str, reply: list[bytes] | Unanswered) -> None:
        if isinstance(reply, Unanswered):
            raise WrongHello(reply)
        if len(reply) != 1:
            raise WrongHello(f"its hello has {len(reply)} parts; expected 1")
        hello = Hello.decode(reply[0], self.num_clients, self.most_examples)
        hello.require_facts(self.facts)
        for client, size in hello.sizes.items():
            if self.registry.claim(client, key):
                self.homes[client] = node
                self.sizes.setdefault(client, size)
            else:
                self._refuse(node, f"its key {key[:12]}... claims the client {client}, which belongs to another")

    def _refuse(self, node: int, reason: str) -> None:
        """Say once why a node is refused."""
        if self._refusals.get(node) != reason:
            print(f"Node {node} is refused: {reason}.", flush=True)
        self._refusals[node] = reason


def _listed(clients: list[int]) -> str:
    return ", ".join(map(str, clients[:_SHOWN])) + (", ..." if len(clients) > _SHOWN else "")
