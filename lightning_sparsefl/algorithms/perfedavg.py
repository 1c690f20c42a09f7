"""Per-FedAvg: Personalized Federated Learning: A Meta-Learning Approach.

Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv:2002.07948, Algorithm 1.

Clients train global weights from which a step of SGD leads to a good model of each client: they step by the gradient of
the loss after such a step (MAML). A client is scored with the server's weights after the adaptation on its own data.

Departures from the paper and from public code:

- The step of a pair of batches is the paper's first-order method (FO). ``order="hessian"`` is its Hessian-free method
  (HF) with triples of batches, where `delta` is the distance in units of the gradient.
- The learning rate of the steps (the paper's beta, .001) is that of the module's optimizer. Batches that make up a
  tuple run on over local epochs; an incomplete last tuple of a participation is left out, although it is charged.
- The adaptation is made with `adapt_steps` gradients of one batch each, taken in evaluation mode. Its work is not
  charged, as that of scoring in general.
- Uploads are averaged by numbers of samples; the paper takes the plain mean.
- FedLPS (Table I) has a row of this name whose program never uses the adapted weights: it is FedAvg, scored after local
  fine-tuning. Its cells have ``alpha=0``, which is FedAvg with half as many steps, and `federation.finetune_epochs`.
  The program's FLOPs count two gradients for each batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.callbacks import MetaStep
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.sparse.masks import descend
from lightning_sparsefl.types import CostFacts, Costs, Message, Update, Weights


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FederatedAlgorithm):
    """Global weights that are trained to be adapted, and scored after the adaptation of each client."""

    can_be_private = True

    alpha: float = 0.01
    """Learning rate of the adaptation, in training and for scores, >= 0; 0 is FedAvg on every second batch."""
    order: Literal["first", "hessian"] = "first"
    """Whether the second derivative is left out (FO), or taken as a difference of gradients on a third batch (HF)."""
    delta: float = 1e-3
    """Distance of that difference, in units of the gradient, above 0."""
    adapt_steps: int = 1
    """Number of steps of the adaptation for scores, >= 0."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.alpha >= 0, "algorithm.alpha", self.alpha, "a number >= 0")
        require(self.delta > 0, "algorithm.delta", self.delta, "a number above 0")
        require(self.adapt_steps >= 0, "algorithm.adapt_steps", self.adapt_steps, "a whole number >= 0")

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the steps by the gradient after an adaptation."""
        return [MetaStep(self.alpha, self.order, self.delta)]

    def train(self, message: Message, client: Client) -> Update:
        """Train the global weights, and keep them after an adaptation."""
        update = super().train(message, client)
        return replace(update, memory={"weights": self._adapt(update.weights, client)})

    def _adapt(self, weights: Weights, client: Client) -> dict[str, Tensor]:
        """Return weights after the adaptation to the client's training data."""
        adapted = dict(weights)
        for _ in range(self.adapt_steps if self.alpha else 0):
            adapted = descend(adapted, client.gradient(adapted), self.alpha)
        return adapted

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the adapted weights, which are in the client's memory."""
        own: Weights = (update.memory or {})["weights"]
        return own

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the server's weights after an adaptation to the client's training data."""
        return self._adapt(message.weights, client)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg, with a fourth gradient for each complete triple of batches."""
        costs = super().costs(facts)
        if self.order == "first":
            return costs
        batches = facts.epochs * -(-facts.samples // facts.batch_size)
        share = 1 + batches // 3 / max(batches, 1)
        return replace(costs, flops_paper=share * costs.flops_paper, flops_analytic=share * costs.flops_analytic)
