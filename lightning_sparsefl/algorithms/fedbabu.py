"""FedBABU: Toward Enhanced Representation for Federated Image Classification.

Oh, Kim, Yun, ICLR 2022, arXiv:2106.06042, Algorithm 1.

The head keeps its random initial weights on all clients and in all rounds; only the body is trained, uploaded and
averaged. After the last round, each client fine-tunes the whole model including the head.

Departures:

- The frozen head gets no gradient, so weight decay and momentum cannot change it; the authors' code gives it a learning
  rate of 0.
- Bodies are averaged by numbers of samples, as in the paper; the code takes the plain mean, which is equal for clients
  of equal size.
- The whole model is sent to the clients in each round, as counted in PerFedMask, although they could keep the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_sparsefl.cost import with_trained_upload
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of, require_passable
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Weights


@dataclass(frozen=True, kw_only=True)
class FedBABU(FederatedAlgorithm):
    """Federated training of the body only, with fine-tuning of the whole model at the end."""

    can_be_private = True

    head: str | None = None
    """Name of the module that is the head; null = the last linear layer."""
    finetune_epochs: int = 5
    """Number of epochs of each client's final fit of the whole model; 0 = no fine-tuning."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.finetune_epochs >= 0, "algorithm.finetune_epochs", self.finetune_epochs, "a whole number >= 0")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the head and return the initial state."""
        head = head_of(
            {n: w for n, w in weights.items() if n not in fleet.buffers},
            self.head,
            fleet.uses,
            "with `algorithm.head`",
        )
        require_passable(weights, head)
        frozen = {name: torch.zeros_like(weights[name], dtype=torch.bool) for name in head}
        return ServerState(round=0, weights=weights, extra={"trainable": frozen})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the model, of which the client may change the body."""
        return Message(weights=server.weights, trainable=server.extra["trainable"])

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the model with all weights trainable, for evaluation and fine-tuning."""
        return Message(weights=server.weights)

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Train the whole model on the client's own data."""
        return client.fit(message.weights, epochs=self.finetune_epochs).weights if self.finetune_epochs else None

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of downloading the whole model and uploading the trained parameters, as in the papers."""
        return with_trained_upload(super().costs(facts), facts)
