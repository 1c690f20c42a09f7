"""The steps of secure sums over Flower's grid: one message for each node and step."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from lightning_sparsefl_flower.directory import Directory
from lightning_sparsefl_flower.hello import agreement
from lightning_sparsefl_flower.link import Unanswered
from lightning_sparsefl_flower.replies import SECURE, Refused, answered, opened, refused
from lightning_sparsefl_flower.secure_sum.node import SecureNode
from lightning_sparsefl_flower.secure_sum.server import Gone

_CLIENT = struct.Struct("<I")


class SecureLink:
    """Lets the clients on the nodes of a directory take a step.

    Args:
        directory: Nodes and their clients.
        timeout: Seconds to wait for the replies of a step.
    """

    def __init__(self, directory: Directory, timeout: float) -> None:
        self.directory, self.timeout = directory, timeout
        self._agreement = agreement(directory.facts)

    def __call__(self, step: str, payloads: Mapping[int, bytes]) -> dict[int, bytes | Gone]:
        """Return what each client sends back, or why it is gone.

        Args:
            step: Name of the step.
            payloads: What the server sends to each client.
        """
        by_node: dict[int, list[int]] = {}
        for client in payloads:
            if client in self.directory.homes:
                by_node.setdefault(self.directory.homes[client], []).append(client)
        requests = {
            node: [SECURE, self._agreement, step.encode(), *(_CLIENT.pack(c) + payloads[c] for c in clients)]
            for node, clients in by_node.items()
        }
        replies = self.directory.link.exchange("train", requests, self.timeout)
        found: dict[int, bytes | Gone] = {client: Gone("no node has it") for client in payloads}
        for node, clients in by_node.items():
            found |= _opened(clients, replies[node])
        return found


def _opened(clients: Sequence[int], replies: list[bytes] | Unanswered) -> dict[int, bytes | Gone]:
    if not isinstance(replies, Unanswered) and len(replies) != len(clients):
        replies = Unanswered(f"its node sent {len(replies)} replies to {len(clients)} clients")
    if isinstance(replies, Unanswered):
        return dict.fromkeys(clients, Gone(replies))
    return {client: _content(reply) for client, reply in zip(clients, replies, strict=True)}


def _content(reply: bytes) -> bytes | Gone:
    try:
        return opened(reply)
    except Refused as refusal:
        return Gone(refusal)


def take_step(node: SecureNode, step: bytes, request: bytes) -> bytes:
    """Return the reply of a node to one client's part of a request.

    Args:
        node: Node with the client's update.
        step: Name of the step.
        request: Number of the client and the payload.

    Raises:
        SecureSumRefused: If the step is not the client's next one, or what the server sends is wrong.
        TooFewClients: If too few clients are left.
    """
    if len(request) < _CLIENT.size:
        return refused("a step of a secure sum names no client")
    (client,), payload = _CLIENT.unpack_from(request), request[_CLIENT.size :]
    return answered(node.step(step.decode(errors="replace"), client, payload))
