"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv:1812.06127, Algorithm 2.

FedAvg with a proximal term in the loss of the clients, which pulls their weights towards the received ones.

Departures from the authors' code:

- Clients are drawn uniformly, and their weights are averaged by numbers of samples, as in FedAvg here. The code draws
  clients in proportion to their samples and takes the plain mean, which has the same expectation.
- Stragglers train for fewer epochs by `federation.local_epochs` and `federation.redraw_local_epochs`: each participant
  is one with a probability, where the code draws a fixed number of them. With E epochs and nine stragglers of ten, the
  list has nine pairs ``[1, E - 1]`` and one E, as in the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.types import Message


@dataclass(frozen=True, kw_only=True)
class FedProx(FederatedAlgorithm):
    """FedAvg with a proximal term in the loss of the clients."""

    can_be_private = True

    mu: float = 0.01
    """Strength of the proximal term, >= 0; 0 is FedAvg."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.mu >= 0, "algorithm.mu", self.mu, "a number >= 0")

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the proximal term, anchored at the received weights."""
        return [ProximalTerm(strength=self.mu, anchor=message.weights)]
