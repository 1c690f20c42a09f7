"""FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction.

Wu, Wang, Li, Kountouris, Liu, NeurIPS 2024, arXiv:2407.19389, sections 3 and 4 and Algorithm 1.

A client of capacity g has the ``floor(g N)`` largest of the N maskable weights of the server's model, in which a
magnitude is the importance: there are no scores. In training the smallest of them is a fixed threshold; a weight that
falls below it is 0 in the model, and gradients of the others are increased by the derivative of the gate. Each weight's
changes are averaged over the participants that have it. The scores of the whole model are logged as ``global/*``, those
of each client's part as ``personal/*``.

Departures from the authors' code:

- A client has exactly ``floor(g N)`` weights; with equal magnitudes the code has more. It also chooses among the biases
  of linear layers, and votes wherever a weight has changed instead of wherever it is held.
- Weights below the threshold keep their values also under momentum and weight decay; the code uses plain SGD.
- Batch norms use the statistics of the current batch, as in :class:`HeteroFL`, and the server's learning rate is 1.
- A client of capacity 1 does not train as FedAvg does, since its gradients are increased as well. With ``boost=False``
  it does, except for a weight that falls below the smallest magnitude of the received ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks.magnitude_gate import MagnitudeGate
from lightning_sparsefl.errors import check_types
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count, kept_counts
from lightning_sparsefl.sparse.masks import add, apply, dense_like, subtract
from lightning_sparsefl.sparse.prune import prune_to, shrink_globally
from lightning_sparsefl.sparse.reparameterize import gate
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.sparse.width import make_norms_static
from lightning_sparsefl.types import ClientView, Masks, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FIARSE(FederatedAlgorithm):
    """Each client trains the largest weights of the model, in a number that depends on its capacity."""

    scope: Literal["global", "layer"] = "global"
    """Whether weights of all layers are compared with each other, or those of each layer."""
    boost: bool = True
    """Whether gradients are multiplied by ``1 + 2 t |w| / (|w| + t)^2``, t being the threshold."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client"

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Choose the layers whose weights are compared, and note their sizes."""
        names = fleet.maskable(weights)
        sizes = {name: torch.tensor(float(weights[name].numel()), device=fleet.device) for name in names}
        return ServerState(round=0, weights=weights, extra={"sizes": sizes})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's largest weights."""
        masks = self.largest({name: server.weights[name] for name in server.extra["sizes"]}, view.capacity)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def largest(self, weights: Weights, capacity: float) -> Masks:
        """Return masks of the largest weights.

        Args:
            weights: Weights that are compared.
            capacity: Fraction of them to keep, in (0, 1].
        """
        if self.scope == "layer":
            shapes = {name: value.shape for name, value in weights.items()}
            return prune_to(magnitude(weights), kept_counts(shapes, dict.fromkeys(shapes, capacity)))
        total = sum(value.numel() for value in weights.values())
        return shrink_globally(magnitude(weights), dense_like(weights), max(1, floor_count(capacity, total)))

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the gate at the thresholds of the client's part."""
        theta = {name: message.weights[name] for name in message.masks}
        return [MagnitudeGate(self._thresholds(message), self.boost, theta=theta)]

    def _thresholds(self, message: Message) -> dict[str, float]:
        """Return the smallest magnitude that each layer holds, or that all hold; 0 for a layer that holds nothing."""
        held = {name: message.weights[name][mask].abs() for name, mask in message.masks.items()}
        smallest = {name: float(values.min()) for name, values in held.items() if len(values)}
        if self.scope == "global":
            return dict.fromkeys(held, min(smallest.values()))
        return {name: smallest.get(name, 0.0) for name in held}

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's part, and send its changes, also those of weights below the threshold."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, message.masks, callbacks=callbacks)
        gates = [callback for callback in callbacks if isinstance(callback, MagnitudeGate)]
        trained = {**result.weights, **gates[0].theta}
        return Update(weights=subtract(trained, message.weights), kind="difference", metrics=result.metrics)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's part, without the weights that fell below the threshold."""
        weights, thresholds = add(message.weights, update.weights), self._thresholds(message)
        alive = {name: gate(weights[name], threshold) for name, threshold in thresholds.items()}
        return apply(weights, alive)
