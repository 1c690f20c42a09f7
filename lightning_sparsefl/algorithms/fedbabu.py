"""FedBABU: Toward Enhanced Representation for Federated Image Classification.

Oh, Kim, Yun, ICLR 2022, arXiv:2106.06042, Algorithm 1.

The head keeps its random start on all clients and in all rounds; only the body is trained, sent up and averaged. When
the rounds are over, each client fine-tunes the whole model, its head too.

Departures:

- The frozen head gets no gradient, so weight decay and momentum cannot move it; the authors' code gives it a learning
  rate of 0.
- Bodies are averaged by samples, as in the paper; the code averages evenly, the same for clients of equal size.
- The whole model is sent down in each round, as PerFedMask counts it, although clients could keep the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import BYTES_PER_WEIGHT, FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.masks import counts, intersect
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Weights


@dataclass(frozen=True, kw_only=True)
class FedBABU(FederatedAlgorithm):
    """Only the body is trained; the head is fine-tuned at the end."""

    can_be_private = True

    head: str | None = None
    """Module that is the head; none = the last linear layer."""
    finetune_epochs: int = 5
    """Epochs of each client's last fit, of the whole model; 0 = none."""

    def __post_init__(self) -> None:
        if self.finetune_epochs < 0:
            raise InvalidOption(f"`FedBABU(finetune_epochs={self.finetune_epochs})`: expected a whole number >= 0.")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the head."""
        head = head_of({n: w for n, w in weights.items() if n not in fleet.buffers}, self.head)
        frozen = {name: torch.zeros_like(weights[name], dtype=torch.bool) for name in head}
        return ServerState(round=0, weights=weights, extra={"trainable": frozen})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The model; of it the body may change."""
        return Message(weights=server.weights, trainable=server.extra["trainable"])

    def finetune(self, server: ServerState, client: Client) -> Weights | None:
        """The whole model, on the client's own data."""
        return client.fit(server.weights, epochs=self.finetune_epochs).weights if self.finetune_epochs else None

    def costs(self, facts: CostFacts) -> Costs:
        """The papers count the whole model down and the trained parameters up."""
        return upload_of_the_trained(super().costs(facts), facts.message)


def upload_of_the_trained(costs: Costs, message: Message) -> Costs:
    """Costs in which a client uploads what it may change, and in which the FLOPs of the paper are the hardware's.

    Args:
        costs: To correct.
        message: What the client received.
    """
    changing = counts(intersect(message.trainable, message.masks))
    sent = sum(changing.get(name, weight.numel()) for name, weight in message.weights.items())
    return replace(costs, flops_paper=costs.flops_analytic, bytes_up_paper=BYTES_PER_WEIGHT * sent)
