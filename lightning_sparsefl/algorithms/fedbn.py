"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, arXiv:2102.07623, Algorithm 1.

A client keeps the parameters and the running statistics of its norms; all other tensors travel and are averaged.

Departures from the authors' code:

- Norms are found by the types of modules: those of torch, and layers whose class is named a norm. The code takes the
  tensors with "bn" in their names.
- The number of batches that a batch norm has seen, which the code keeps too, starts from 0 in every fit; it matters
  only to norms without a momentum.
- Statistics are kept with `federation.buffers` of `average` and `local`; `server` leaves them at their initial values.
- A client that never took part is scored with initial norms, and so is the server's model (``global/*``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sparsefl.algorithms import _own_part
from lightning_sparsefl.errors import check_types
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.parts import NORM, part
from lightning_sparsefl.types import ClientView, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedBN(FederatedAlgorithm):
    """Each client keeps its own norms, with their statistics."""

    can_be_private = True

    mean: Literal["uniform", "samples"] = "uniform"
    """Whether all participants weigh the same in the mean (the code), or by their numbers of samples."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the norms and return the initial state."""
        return _own_part.start(weights, part(weights, [NORM], buffers=fleet.buffers, norms=fleet.norms))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send all tensors but those of the norms."""
        return _own_part.shared_part(server)

    def train(self, message: Message, client: Client) -> Update:
        """Train the whole model; send what is no norm."""
        result = client.fit(_own_part.joined(message, client), callbacks=self.callbacks(message, client))
        return _own_part.divided(result, message, 1 if self.mean == "uniform" else client.num_examples)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's model after training."""
        return _own_part.whole(update)

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the server's tensors with the client's own norms."""
        return _own_part.joined(message, client)
