"""SNIP: Single-shot Network Pruning based on Connection Sensitivity, in a federation.

Lee, Ajanthan, Torr, ICLR 2019, arXiv:1810.02340, as a baseline of FedDIP (arXiv:2309.06805, Table III) and of PruneFL
(arXiv:1909.12326).

Before the first round, every client sends the gradient of one batch at the initial weights. The server scores each
weight by ``|w * g|`` with the mean gradient g, keeps the globally largest scores, and all rounds train under this mask.

Departures from the paper and from public code:

- The paper prunes one model on one batch; here the gradient is the mean over all clients, weighted by their samples.
  FedDIP's code asks one client: ``scored_by="one"``. That code also draws other weights to compute scores with, and
  passes logits to `nll_loss`; both are replaced by the module's own initial weights and loss.
- PruneFL's code trains a dense round first, takes the mean change of weights over the learning rate as gradient, and
  prunes the weights of that round. Here the mask and the weights are those of the initialization.
- A layer keeps one weight at least; public code may leave it empty.
- Ties are broken by the index, so that the number of kept weights is exact.
- The gradient is computed in evaluation mode. Its FLOPs are not charged; its bytes are, to the first round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_sparsefl.algorithms._first_mask import start_under_mask
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.scores import snip
from lightning_sparsefl.types import Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class SNIP(FederatedAlgorithm):
    """One global mask, computed from gradients at the initial weights, under which all rounds train."""

    density: float = 0.1
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    scored_by: Literal["all", "one"] = "all"
    """Clients whose gradients determine the mask: all, or the first one."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Ask the clients for gradients at the initial weights, which they have, and prune."""
        pool = fleet.prunable(weights, self.dense_layers)
        asked = {} if self.scored_by == "all" else {"asked": {"client": torch.tensor([float(fleet.views[0].id)])}}
        mean = fleet.survey(Message(weights={}, extra=asked)).weights
        return start_under_mask(weights, snip(pool, mean), self.density)

    def survey(self, message: Message, client: Client) -> Update:
        """Return the gradient of one batch at the initial weights, unless another client is asked for it."""
        if message.extra and int(message.extra["asked"]["client"]) != client.id:
            return Update(weights={})
        return Update(weights=client.gradient({}), weight=client.num_examples)
