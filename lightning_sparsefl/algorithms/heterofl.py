"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients.

Diao, Ding, Tarokh, ICLR 2021, arXiv:2010.01264, section 3 and Algorithm 1.

A client of rate r trains the first ``ceil(r * C)`` channels or neurons of every hidden layer; inputs and outputs of the
network keep their sizes. In training, layers divide their outputs by r (the Scaler), and batch norms have no running
statistics. Each coordinate is averaged over the participants that have it; without any, the server keeps its value.
With `label_mask`, the logits of classes that a client does not have are 0 in training, and its rows of the last layer
do not vote. The scores of the whole network are logged as ``global/*``, those of each client's width as ``personal/*``.

Departures from the authors' code:

- Batch norms use the statistics of the current batch in evaluation too, as in the runs of PerFedMask and Split-Mix. The
  authors collect statistics over the training data of all clients after training.
- Scores never use the label mask, which increases the local accuracy of the authors by revealing the classes.
- Clients are scored and fine-tuned with their own widths; `scored: whole` takes the whole network for all of them, as
  the program of PerFedMask does in its comparison.
- Rates are fixed for a run, the first setting of the paper; the second, in which they are drawn again in each round, is
  `federation.redraw_capacities`.
- Gradients are clipped only with `trainer.gradient_clip_val`; in the code, to a norm of 1.
- The paper's bytes count weights only, since the rate determines the masks. Here masks are sent once to each client.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler, votes_on_own_classes
from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import largest_rate, make_norms_static, prefix_units
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    FitResult,
    Masks,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class HeteroFL(FederatedAlgorithm):
    """Each client trains the first channels of every layer, in a number that depends on its capacity."""

    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Widths, in (0, 1]; a client has the largest one up to its capacity (`federation.capacities`)."""
    scaler: bool = True
    """Whether layers divide their outputs by the width in training."""
    label_mask: bool = False
    """Whether classes that a client does not have are excluded from its loss and its votes."""
    head: str | None = None
    """Name of the layer with the logits, for `label_mask`; null = the last linear layer."""
    scored: Literal["own", "whole"] = "own"
    """Network that a client is scored and fine-tuned with: that of its own width, or the whole one."""
    finetune_epochs: int = 0
    """Number of epochs of each client's final fit; 0 = no fine-tuning."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(
            bool(self.rates) and all(0 < rate <= 1 for rate in self.rates),
            "algorithm.rates",
            self.rates,
            "one or more numbers in (0, 1]",
        )
        require(self.finetune_epochs >= 0, "algorithm.finetune_epochs", self.finetune_epochs, "a whole number >= 0")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client" if max(self.rates) == 1 else None

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Compute the masks of each width, including those of clients that never train."""
        for view in fleet.views:
            self.rate(view.capacity)  # raises if the capacity is too small
        masks = {
            str(rate): unit_masks(fleet.units, prefix_units(fleet.units, rate), weights)
            for rate in self.rates
            if rate < 1
        }
        return ServerState(round=0, weights=weights, extra=masks)

    def rate(self, capacity: float) -> float:
        """Return the width of a client.

        Args:
            capacity: Capacity of the client, in (0, 1].

        Raises:
            InvalidOption: If no rate is small enough.
        """
        return largest_rate(self.rates, capacity)

    def network(self, server: ServerState, view: ClientView) -> Masks:
        """Return the masks of a client's network.

        Args:
            server: State of the server in any round.
            view: View of the client.
        """
        rate = self.rate(view.capacity)
        return server.extra[str(rate)] if rate < 1 else {}

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's narrow network."""
        masks = self.network(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the network that the client is scored with."""
        return Message(weights=server.weights) if self.scored == "whole" else self.download(server, view)

    def alike(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the width of the client's network."""
        return self.rate(view.capacity)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the scaling of hidden layers and the mask of logits."""
        rate, found = self._width(message, client), list[Callback]()
        if self.scaler and rate < 1:
            found.append(OutputScaler(dict.fromkeys(name for group in client.units for name in group.layers), rate))
        if self.label_mask:
            found.append(
                LabelMask(head_of(message.weights, self.head, client.uses, "with `algorithm.head`"), client.id)
            )
        return found

    def train(self, message: Message, client: Client) -> Update:
        """Train the narrow network."""
        result = self._fit(message, client)
        votes = votes_on_own_classes(message, result.callbacks)
        return Update(weights=result.weights, votes=votes, metrics=result.metrics)

    def _width(self, message: Message, client: Client) -> float:
        """Return the width of the network in a message, which is the whole one if it has no masks."""
        return self.rate(client.capacity) if message.masks else 1.0

    def _fit(self, message: Message, client: Client, epochs: int | None = None) -> FitResult:
        rate = self._width(message, client)
        return client.fit(
            message.weights,
            trainable=message.trainable,
            callbacks=self.callbacks(message, client),
            epochs=epochs,
            units=prefix_units(client.units, rate) if rate < 1 else None,
        )

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Train all of the network that the client is scored with on its own data."""
        if not self.finetune_epochs:
            return None
        return self._fit(message, client, self.finetune_epochs).weights

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the narrow network, including those of its biases."""
        return super().costs(narrow_facts(facts))
