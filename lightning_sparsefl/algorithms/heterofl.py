"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients.

Diao, Ding, Tarokh, ICLR 2021, arXiv:2010.01264, section 3 and Algorithm 1.

A client of rate r trains the first ``ceil(r * C)`` channels or neurons of every hidden layer; inputs and outputs of the
network stay whole. While it trains, layers divide their outputs by r (the Scaler), and batch norms keep no running
statistics. Each coordinate is averaged over the participants that hold it; where nobody does, the server's value stays.
With `label_mask` the logits of classes that a client does not have are 0 while it trains, and its rows of the last
layer do not vote. The whole network is scored as ``global/*``, each client's width as ``personal/*``.

Departures from the authors' code:

- Batch norms take the statistics of the batch at hand in evaluation too, as in the runs of PerFedMask and Split-Mix.
  The authors gather statistics over everybody's training data once training is over.
- Scores never use the label mask, which raises the authors' local accuracy by what it gives away.
- Rates are fixed for a run, the paper's first way; the second draws them anew in each round.
- Gradients are clipped, to a norm of 1 in the code, only by `trainer.gradient_clip_val`.
- The paper's bytes count weights only: which ones follows from the rate. On the wire the masks are sent, once a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.masks import apply, counts, intersect
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import make_norms_static, prefix_units
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    FitResult,
    LayerFlops,
    Masks,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class HeteroFL(FederatedAlgorithm):
    """Each client trains the first channels of every layer, as many as its capacity allows."""

    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Widths, in (0, 1]; a client has the largest that its capacity (`federation.capacities`) reaches."""
    scaler: bool = True
    """Whether layers divide their outputs by the width while they train."""
    label_mask: bool = False
    """Whether a client leaves classes that it does not have out of its loss, and out of its vote."""
    head: str | None = None
    """With `label_mask`: the layer that puts out the logits; none = the last linear layer."""
    finetune_epochs: int = 0
    """Epochs of each client's last fit, at its own width; 0 = none."""

    def __post_init__(self) -> None:
        if not self.rates or any(not 0 < rate <= 1 for rate in self.rates):
            raise InvalidOption(f"`HeteroFL(rates={self.rates})`: expected one or more numbers in (0, 1].")
        if self.finetune_epochs < 0:
            raise InvalidOption(f"`HeteroFL(finetune_epochs={self.finetune_epochs})`: expected a whole number >= 0.")

    def adapt(self, module: LightningModule) -> None:
        """Batch norms keep no statistics; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """The masks of each width, also of those that only clients have who never train."""
        for view in fleet.views:
            self.rate(view.capacity)  # refuses what is too weak
        masks = {
            str(rate): unit_masks(fleet.units, prefix_units(fleet.units, rate), weights)
            for rate in self.rates
            if rate < 1
        }
        return ServerState(round=0, weights=weights, extra=masks)

    def rate(self, capacity: float) -> float:
        """The width of a client.

        Args:
            capacity: Of the client, in (0, 1].

        Raises:
            InvalidOption: If no rate is small enough.
        """
        within = [rate for rate in self.rates if rate <= capacity]
        if not within:
            raise InvalidOption(
                f"A client has the capacity {capacity}, and the smallest of `algorithm.rates` is {min(self.rates)}; "
                "add a smaller rate, or raise `federation.capacities`."
            )
        return max(within)

    def network(self, server: ServerState, view: ClientView) -> Masks:
        """What a client holds, as masks.

        Args:
            server: In any round.
            view: Of the client.
        """
        rate = self.rate(view.capacity)
        return server.extra[str(rate)] if rate < 1 else {}

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The client's narrow network."""
        masks = self.network(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Scale the hidden layers, mask the logits."""
        rate, found = self.rate(client.capacity), list[Callback]()
        if self.scaler and rate < 1:
            found.append(OutputScaler(dict.fromkeys(name for group in client.units for name in group.layers), rate))
        if self.label_mask:
            found.append(LabelMask(head_of(message.weights, self.head)[0].rpartition(".")[0], client.id))
        return found

    def train(self, message: Message, client: Client) -> Update:
        """Train the narrow network."""
        result = self._fit(message.weights, message, client)
        return Update(weights=result.weights, votes=self._votes(message, result), metrics=result.metrics)

    def _fit(self, weights: Weights, message: Message, client: Client, epochs: int | None = None) -> FitResult:
        rate = self.rate(client.capacity)
        return client.fit(
            weights,
            trainable=message.trainable,
            callbacks=self.callbacks(message, client),
            epochs=epochs,
            units=prefix_units(client.units, rate) if rate < 1 else None,
        )

    def _votes(self, message: Message, result: FitResult) -> Masks | None:
        """Everything held and trained; of the head the rows of the client's classes."""
        classes = next((c.classes for c in result.callbacks if isinstance(c, LabelMask)), None)
        if classes is None or bool(classes.all()):
            return None
        own = {name: _rows(classes, message.weights[name]) for name in head_of(message.weights, self.head)}
        return intersect(intersect(message.trainable, message.masks), own)

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """The client's narrow network."""
        return apply(server.weights, self.network(server, client.view))

    def finetune(self, server: ServerState, client: Client) -> Weights | None:
        """The client's narrow network, all of it, on its own data."""
        if not self.finetune_epochs:
            return None
        message = self.download(server, client.view)
        return self._fit(message.weights, message, client, self.finetune_epochs).weights

    def costs(self, facts: CostFacts) -> Costs:
        """Those of the narrow network, biases and all."""
        return super().costs(replace(facts, layers=narrow_biases(facts.layers, facts.message.masks)))


def _rows(classes: Tensor, weight: Tensor) -> Tensor:
    """A mask over a tensor with a row for each class."""
    return classes.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight)


def narrow_biases(layers: Sequence[LayerFlops], masks: Masks) -> list[LayerFlops]:
    """Layers with the bias additions of the units that are there; their products are scaled by the masks elsewhere.

    Args:
        layers: Of the whole network.
        masks: Of the narrow one.
    """
    kept = counts(masks)
    biases = {layer.weight: layer.weight.removesuffix("weight") + "bias" for layer in layers}
    return [
        replace(layer, bias=layer.bias * kept[biases[layer.weight]] // masks[biases[layer.weight]].numel())
        if layer.bias and biases[layer.weight] in kept
        else layer
        for layer in layers
    ]
