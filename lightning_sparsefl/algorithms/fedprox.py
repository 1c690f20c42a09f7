"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv:1812.06127, Algorithm 2.

FedAvg whose clients are pulled towards the weights they received. Departures from the authors' code: clients are
drawn uniformly and averaged by samples, as in FedAvg here, where the code draws by samples and averages evenly; the
two have the same expectation. Every participant finishes its epochs: stragglers are not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.types import Message


@dataclass(frozen=True, kw_only=True)
class FedProx(FederatedAlgorithm):
    """FedAvg with a proximal term in the clients' loss."""

    can_be_private = True

    mu: float = 0.01
    """Strength of the pull, >= 0; 0 is FedAvg."""

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise InvalidOption(f"`FedProx(mu={self.mu})`: expected a number >= 0.")

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """The pull towards what was received."""
        return [ProximalTerm(strength=self.mu, anchor=message.weights)]
