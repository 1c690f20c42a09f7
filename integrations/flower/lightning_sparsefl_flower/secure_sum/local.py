"""Secure sums among clients of this process, for rehearsals and tests: what is sent passes as bytes all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused, TooFewClients
from lightning_sparsefl_flower.secure_sum.node import SecureNode
from lightning_sparsefl_flower.secure_sum.server import Gone


@dataclass(frozen=True)
class LocalClients:
    """Lets the clients of nodes in this process take a step."""

    nodes: Mapping[int, SecureNode]
    """Node of each client."""

    def __call__(self, step: str, payloads: Mapping[int, bytes]) -> dict[int, bytes | Gone]:
        """Return what each client sends back, or why it is gone.

        Args:
            step: Name of the step.
            payloads: What the server sends to each client.
        """
        return {client: self._step(step, client, payload) for client, payload in payloads.items()}

    def _step(self, step: str, client: int, payload: bytes) -> bytes | Gone:
        try:
            return self.nodes[client].step(step, client, payload)
        except (SecureSumRefused, TooFewClients) as error:
            return Gone(str(error))
