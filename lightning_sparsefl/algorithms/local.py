"""Local: every client trains alone, the baseline of FedSpa (Huang et al., Table 1) and of Ditto.

A client downloads the common initial weights once, keeps its own model from then on, and sends none. Departures: the
papers count no bytes at all, and so does the paper column here; the wire column shows the first download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class Local(FederatedAlgorithm):
    """No federation: a client only ever sees its own data."""

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The initial weights at a client's first participation, nothing later."""
        return Message(weights={} if view.shared.get("started") else server.weights)

    def train(self, message: Message, client: Client) -> Update:
        """Go on from the client's own weights."""
        own: Mapping[str, object] = client.memory.get("weights", {})
        result = client.fit(client.memory["weights"] if own else message.weights)
        return Update(
            weights={},
            weight=client.num_examples,
            shared={"started": True},
            memory={"weights": dict(result.weights)},
            metrics=result.metrics,
        )

    def trained(self, message: Message, update: Update) -> Weights:
        """What the client keeps, since it sends nothing."""
        own: Weights = (update.memory or {})["weights"]
        return own

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """The client's own weights; the initial ones if it was never drawn."""
        own: Weights = client.memory.get("weights", server.weights)
        return own

    def costs(self, facts: CostFacts) -> Costs:
        """Training as in FedAvg; the papers count no bytes."""
        return replace(super().costs(facts), bytes_down_paper=0, bytes_up_paper=0)
