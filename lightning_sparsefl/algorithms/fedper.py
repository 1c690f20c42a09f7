"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan, Aggarwal, Singh, Choudhary, arXiv:1912.00818, Algorithms 1 and 2.

A client keeps the last layers of the model and trains all layers together; only the other layers travel, and are
averaged by numbers of samples. FedPer is a row of FedLPS (arXiv:2412.07216, Table I).

Departures from the paper, whose authors published no code:

- The own layers are the last linear layer by default. The paper keeps one to four basic blocks as well, which can be
  named with `own`; FedLPS does not say which layers it keeps.
- A client that never took part is scored with its initial own layers. Those of the server are never trained, so that
  ``global/*`` scores the shared layers under an untrained head.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.algorithms import _own_part
from lightning_sparsefl.errors import check_types
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import ClientView, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedPer(FederatedAlgorithm):
    """Each client keeps its own last layers and trains them together with the shared ones."""

    can_be_private = True

    own: tuple[str, ...] = ("head",)
    """Layers that clients keep: names of modules, globs over names of tensors, ``head`` for the last linear layer,
    ``norm`` for all norms."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the own layers and return the initial state."""
        return _own_part.start(weights, _own_part.chosen(weights, self.own, fleet))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the shared layers."""
        return _own_part.shared_part(server)

    def train(self, message: Message, client: Client) -> Update:
        """Train all layers; send the shared ones and keep the own ones."""
        result = client.fit(_own_part.joined(message, client), callbacks=self.callbacks(message, client))
        return _own_part.divided(result, message, client.num_examples)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's shared and own layers after training."""
        return _own_part.whole(update)

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the server's shared layers with the client's own ones."""
        return _own_part.joined(message, client)
