"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv:2111.04263, Algorithm 1; equations are
numbered as there.

Each client keeps an estimate of its gradient at the optimum. A linear term with it and a proximal term change its loss
in each round (eq. 1), so that the minima of the clients' losses come to agree with that of their mean. The server
corrects the mean of the clients' weights by h, the mean of these estimates.

Departures from the authors' code:

- The mean is plain, and alpha is the same for all clients, as in the paper; the code divides alpha by a client's number
  of samples in units of the mean number.
- The server's model is scored, which h has corrected and which clients receive. The code scores the mean of the
  clients' weights before that correction.
- A coordinate that no client votes on keeps its value and h. One that a part of the cohort votes on changes h by the
  number of its voters, as DepthFL needs; without masks this is the paper's rule.
- h and the clients' estimates are of parameters alone; buffers are averaged by samples, as in FedAvg.
- The learning rate of the paper falls by 0.998 in each round, and weights decay by 0.001: `trainer.round_lr` and the
  module's optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.algorithms._dynamic_regularization import NEEDS_EXACT_MEAN, with_correction
from lightning_sparsefl.callbacks import GradientOffset, ProximalTerm
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.types import Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedDyn(FederatedAlgorithm):
    """FedAvg of clients whose losses have a linear and a proximal term that change with the rounds."""

    alpha: float = 0.1
    """Strength of the dynamic regularization, above 0."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.alpha > 0, "algorithm.alpha", self.alpha, "a number above 0")

    @property
    def needs_exact_mean(self) -> str | None:
        """The server's correction."""
        return NEEDS_EXACT_MEAN

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights, h = 0, and the number of clients."""
        h = {name: torch.zeros_like(value) for name, value in weights.items() if name not in fleet.buffers}
        number = torch.tensor(float(len(fleet)), device=fleet.device)
        return ServerState(round=0, weights=weights, extra={"h": h, "fleet": {"clients": number}})

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the linear term, once the client has one, and the proximal term."""
        gradient = client.memory.get("gradient", {})
        linear: list[Callback] = [GradientOffset({n: -g for n, g in gradient.items()})] if gradient else []
        return [*linear, ProximalTerm(self.alpha, anchor=message.weights)]

    def train(self, message: Message, client: Client) -> Update:
        """Train, and keep g - alpha (w_k - w)."""
        result = client.fit(message.weights, message.masks, callbacks=self.callbacks(message, client))
        old = client.memory.get("gradient", {})
        parameters = without(result.weights, client.buffers)
        gradient = {n: old.get(n, 0) - self.alpha * (w - message.weights[n]) for n, w in parameters.items()}
        return Update(weights=result.weights, memory={"gradient": gradient}, metrics=result.metrics)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Return the mean minus h / alpha, with h - alpha (voters / clients) (mean - w)."""
        return with_correction(server, super().aggregate(server, merged), merged, self.alpha)
