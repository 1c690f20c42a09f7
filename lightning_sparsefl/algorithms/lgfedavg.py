"""LG-FedAvg: Think Locally, Act Globally: Federated Learning with Local and Global Representations.

Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency, arXiv:2001.01523, Algorithm 1.

The inverse of FedPer: a client keeps the first layers, which make its own representation, and only the last layers
travel and are averaged. The paper starts from a model that FedAvg has trained: pass such a module to the trainer.

Departures from the authors' code:

- Layers are those of :func:`~lightning_sparsefl.sparse.layer_groups.layer_groups`, where a norm belongs to the layer
  before it and a block is one layer. The code lists the layers of its two networks by hand.
- A client that never took part is scored with its initial layers below the server's last ones. The paper takes the mean
  of the logits of all clients' models, which is not a model that can be kept or exported.
- Scores are those of the round; the authors' script reports each client's best test accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.algorithms import _own_part
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import require_untied_head
from lightning_sparsefl.sparse.parts import layers_with_buffers, without
from lightning_sparsefl.types import ClientView, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(FederatedAlgorithm):
    """Each client keeps its own first layers, and shares the last ones."""

    can_be_private = True

    layers_shared: int = 2
    """Number of last layers that are shared: 2 of the paper's CNN, 3 of its MLP."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.layers_shared >= 0, "algorithm.layers_shared", self.layers_shared, "a whole number >= 0")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the last layers and return the initial state.

        Raises:
            InvalidOption: If there are fewer layers, or the last linear one shares a tensor with another layer.
        """
        if self.layers_shared:
            require_untied_head(without(weights, fleet.buffers), fleet.uses, named=None)
        layers = list(layers_with_buffers(weights, fleet.buffers).values())
        expected = f"at most {len(layers)}, the layers of the model"
        require(self.layers_shared <= len(layers), "algorithm.layers_shared", self.layers_shared, expected)
        shared = [name for names in layers[len(layers) - self.layers_shared :] for name in names]
        return _own_part.start(weights, without(weights, shared))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the last layers."""
        return _own_part.shared_part(server)

    def train(self, message: Message, client: Client) -> Update:
        """Train all layers; send the last ones and keep the first ones."""
        result = client.fit(_own_part.joined(message, client), callbacks=self.callbacks(message, client))
        return _own_part.divided(result, message, 1)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's shared and own layers after training."""
        return _own_part.whole(update)

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the server's last layers on the client's own ones."""
        return _own_part.joined(message, client)
