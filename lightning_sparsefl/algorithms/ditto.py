"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221, Algorithm 1.

Each client trains two models. The first is FedAvg's: it starts from the received weights and is uploaded. The second
stays on the client, and is trained with a proximal term that pulls it towards the received weights.

Departures from the authors' code:

- Each participation trains the first model for its epochs, then the second one. The code alternates between the two
  models, batch by batch, which is the same up to the order of the batches.
- Uploads are averaged by numbers of samples, and clients are drawn uniformly, as in FedAvg here. The code draws clients
  in proportion to their samples and takes the plain mean, which has the same expectation.
- With `lams`, such as .1, 1 and 2 in the code, a participation trains a personal model with each strength, and keeps
  that with the best score on the client's validation data. The code makes this choice in each step.
- Clients that were never drawn are scored with the server's weights; the code scores them with the initial ones.

FedLPS (Table I) trains both models for five epochs; its program pulls by the norm itself, not by its square, and with
strength .001.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_sparsefl.algorithms._personal_masks import score
from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.types import CostFacts, Costs, Message, Update, Weights


@dataclass(frozen=True, kw_only=True)
class Ditto(FederatedAlgorithm):
    """FedAvg beside a personal model of each client, which a proximal term pulls towards the received weights."""

    can_be_private = True

    lam: float = 1.0
    """Strength of the proximal term of the personal model (lambda), >= 0; 0 is Local."""
    lams: tuple[float, ...] = ()
    """Strengths of which each participation chooses one, each >= 0; empty = always `lam`."""
    metric: str = "val_loss"
    """Metric of the module's `validation_step` by which the strength is chosen, on a client's validation data."""
    global_epochs: int | None = None
    """Number of epochs of the model that is uploaded; null = `trainer.max_epochs`."""
    personal_epochs: int | None = None
    """Number of epochs of the personal model; null = `trainer.max_epochs`."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.lam >= 0, "algorithm.lam", self.lam, "a number >= 0")
        require(all(lam >= 0 for lam in self.lams), "algorithm.lams", self.lams, "numbers >= 0")
        for name in ("global_epochs", "personal_epochs"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"algorithm.{name}", value, "a whole number >= 1, or null")

    @property
    def without_validation(self) -> str | None:
        """One strength, among which nothing is chosen."""
        return "set `algorithm.lams` to one value" if len(self.lams) > 1 else None

    def train(self, message: Message, client: Client) -> Update:
        """Train the global model, then the personal one."""
        common = client.fit(message.weights, callbacks=self.callbacks(message, client), epochs=self.global_epochs)
        return Update(
            weights=common.weights,
            weight=client.num_examples,
            memory={"weights": dict(self._personal(message, client))},
            metrics=common.metrics,
        )

    def _personal(self, message: Message, client: Client) -> Weights:
        """Return the personal model after training, of several strengths the best one."""
        start, models = client.memory.get("weights", {}), []
        for lam in self.lams or (self.lam,):
            pull = ProximalTerm(strength=lam, anchor=message.weights)
            callbacks = [*self.callbacks(message, client), pull]
            models.append(client.fit(start, callbacks=callbacks, epochs=self.personal_epochs).weights)
        if len(models) == 1:
            return models[0]
        sign = 1 if higher_is_better(self.metric) else -1
        scores = [sign * score(client, model, "val", self.metric) for model in models]
        return models[max(range(len(models)), key=lambda place: _least_if_undefined(scores[place]))]

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the personal model, which is in the client's memory."""
        own: Weights = (update.memory or {})["weights"]
        return own

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the personal model, or the server's weights for a client that never participated."""
        own: Weights = client.memory.get("weights", message.weights)
        return own

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg, with the epochs of all models; scores are not charged."""
        common, own = (facts.epochs if own is None else own for own in (self.global_epochs, self.personal_epochs))
        return super().costs(replace(facts, epochs=common + max(1, len(self.lams)) * own))


def _least_if_undefined(value: float) -> float:
    """Return a score, or minus infinity for that of a model whose training has diverged."""
    return -math.inf if math.isnan(value) else value
