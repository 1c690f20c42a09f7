"""Local: every client trains on its own, the baseline of FedSpa (Huang et al., Table 1) and of Ditto.

A client downloads the common initial weights once, then keeps its own model and never sends it. Departures: none. As in
the papers, the paper's bytes are 0; the measured bytes include the first download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class Local(FederatedAlgorithm):
    """Local training without aggregation."""

    has_global_model = False
    uploads_shared = True

    @property
    def needs_exact_mean(self) -> str:
        """That no weights are merged."""
        return "has no weights that the server merges"

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the initial weights at a client's first participation, and no weights later."""
        return Message(weights={} if view.shared.get("started") else server.weights)

    def train(self, message: Message, client: Client) -> Update:
        """Train from the client's own weights, or from the received ones the first time."""
        own: Mapping[str, object] = client.memory.get("weights", {})
        start = client.memory["weights"] if own else message.weights
        result = client.fit(start, callbacks=self.callbacks(message, client))
        return Update(
            weights={},
            weight=client.num_examples,
            shared={"started": True},
            memory={"weights": dict(result.weights)},
            metrics=result.metrics,
        )

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the weights in the client's memory, since it sends none."""
        own: Weights = (update.memory or {})["weights"]
        return own

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the client's own weights, or the initial weights if it never participated."""
        own: Weights = client.memory.get("weights", message.weights)
        return own

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg without the paper's bytes."""
        return replace(super().costs(facts), bytes_down_paper=0, bytes_up_paper=0)
