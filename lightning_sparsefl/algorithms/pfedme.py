"""pFedMe: Personalized Federated Learning with Moreau Envelopes.

Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848, Algorithm 1.

On each batch, a client makes K steps of personal weights theta, which a proximal term pulls towards its copy w of the
global weights, and then moves w towards theta. The copies are averaged, and the server moves by a multiple of the
change. A client is scored with its last theta.

Departures from the paper and the authors' code:

- The copies are averaged by numbers of samples, as in the code; the paper takes the plain mean.
- Only drawn clients train. In the code all clients train in each round, and the drawn ones are merged.
- The code has a weight decay of .001 on theta that the paper does not mention: ``decay=0.001``.
- The number of batches in a round is that of the local epochs (`trainer.max_epochs`), not a number R of its own.
- ``lam * (w - theta)`` is the gradient that the module's optimizer gets, so that plain SGD makes the paper's step. Its
  learning rate times `lam` must be below 1. Momentum and weight decay act on it as on any gradient.
- Running statistics are those of theta, and so are the metrics of the training step. The server averages them, and
  `beta` applies to parameters only.
- Clients that were never drawn are scored with the server's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import MoreauEnvelope
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import interpolate
from lightning_sparsefl.types import CostFacts, Costs, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class PFedMe(FederatedAlgorithm):
    """Global weights that are trained towards personal weights of each client, by Moreau envelopes."""

    can_be_private = True

    lam: float = 15.0
    """Strength of the proximal term (lambda), above 0; times the learning rate of the module's optimizer below 1."""
    personal_lr: float = 0.09
    """Learning rate of the personal weights, above 0."""
    steps: int = 5
    """Number of steps of the personal weights for each batch (K)."""
    beta: float = 1.0
    """Multiple of the clients' mean change that the server makes, above 0; 1 is their mean."""
    decay: float = 0.0
    """Weight decay of the personal weights, >= 0."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("lam", "personal_lr", "beta"):
            value = getattr(self, name)
            require(value > 0, f"algorithm.{name}", value, "a number above 0")
        require(self.steps >= 1, "algorithm.steps", self.steps, "a whole number >= 1")
        require(self.decay >= 0, "algorithm.decay", self.decay, "a number >= 0")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first state, which marks the buffers if `beta` is not to be applied to them."""
        buffers = {name: torch.zeros((), device=fleet.device) for name in weights if name in fleet.buffers}
        extra = {"buffers": buffers} if buffers and self.beta != 1 else {}
        return ServerState(round=0, weights=weights, extra=extra)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the training of the personal weights, which start from the received ones."""
        return [MoreauEnvelope(self.lam, self.personal_lr, self.steps, self.decay)]

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's copy of the global weights, and keep the personal weights."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)
        envelope = next(callback for callback in callbacks if isinstance(callback, MoreauEnvelope))
        return Update(
            weights=result.weights,
            weight=client.num_examples,
            memory={"weights": {**result.weights, **envelope.personal}},
            metrics=result.metrics,
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Move by `beta` times the clients' mean change; buffers become their mean."""
        mean = super().aggregate(server, merged)
        if self.beta == 1:
            return mean
        buffers = server.extra.get("buffers", {})
        parameters = {name: value for name, value in mean.weights.items() if name not in buffers}
        weights = interpolate(parameters, {**server.weights, **{n: mean.weights[n] for n in buffers}}, self.beta)
        return replace(mean, weights=weights)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the personal weights, which are in the client's memory."""
        own: Weights = (update.memory or {})["weights"]
        return own

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the personal weights, or the server's for a client that never participated."""
        own: Weights = client.memory.get("weights", message.weights)
        return own

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg, with K gradients for each batch."""
        return super().costs(replace(facts, epochs=self.steps * facts.epochs))
