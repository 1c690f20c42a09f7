"""APFL: Adaptive Personalized Federated Learning.

Deng, Kamani, Mahdavi, arXiv:2003.13461, Algorithm 1.

Each client trains the global model, which is uploaded, and personal weights v, which stay on the client. It is scored
with the mixture of both, and v is trained as a part of that mixture. The share of v can be trained too.

Departures from the paper and from public code:

- Both gradients of a batch are taken at its start, as in the paper. PFLlib takes that of v at v instead of at the
  mixture, and replaces v by the mixture; FedTorch mixes outputs of the two models instead of weights.
- With `adaptive`, the share moves once per participation, with the first step. FedTorch adds .02 alpha to its gradient,
  which the paper does not have.
- Personal weights are trained by plain SGD at the learning rate of the module's optimizer, without its momentum, weight
  decay and clipping.
- The global model is averaged by numbers of samples, and buffers of the mixture are those of the global model on the
  client, since no training pass that keeps buffers is made at the mixture.
- Clients that were never drawn are scored with the server's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_sparsefl.callbacks import PersonalMixture
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.sparse.masks import interpolate
from lightning_sparsefl.types import CostFacts, Costs, Message, Update, Weights


@dataclass(frozen=True, kw_only=True)
class APFL(FederatedAlgorithm):
    """FedAvg beside personal weights of each client, which is scored with a mixture of both."""

    can_be_private = True

    alpha: float = 0.75
    """Share of the personal weights in the mixture at a client's first participation, in [0, 1]."""
    adaptive: bool = False
    """Whether each client trains its share."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 <= self.alpha <= 1, "algorithm.alpha", self.alpha, "a number in [0, 1]")

    def train(self, message: Message, client: Client) -> Update:
        """Train the global model and the personal weights on the same batches."""
        share, personal = client.memory.get("alpha", self.alpha), client.memory.get("personal", client.initial)
        mixture = PersonalMixture(share, self.adaptive, personal)
        result = client.fit(message.weights, callbacks=[*self.callbacks(message, client), mixture])
        own = {
            "alpha": mixture.alpha,
            "personal": mixture.personal,
            "mixture": interpolate(mixture.personal, result.weights, mixture.alpha),
        }
        return Update(weights=result.weights, weight=client.num_examples, memory=own, metrics=result.metrics)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the mixture, which is in the client's memory."""
        own: Weights = (update.memory or {})["mixture"]
        return own

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the mixture, or the server's weights for a client that never participated."""
        own: Weights = client.memory.get("mixture", message.weights)
        return own

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg, with two gradients for each batch."""
        return super().costs(replace(facts, epochs=2 * facts.epochs))
