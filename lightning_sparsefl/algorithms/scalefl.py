"""ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients.

Ilhan, Su, Liu, CVPR 2023; a row of FIARSE, arXiv:2407.19389.

The model consists of blocks with an exit after each (:mod:`~lightning_sparsefl.models.exits`). A client's network is
smaller in depth and in width: its first blocks with their exits, in a number that depends on its capacity, and of them
the first channels or neurons of every hidden layer, a fraction that is set for each number of blocks. Deeper exits
weigh more in its loss, and after a quarter of the run the last one teaches the others. Layers divide their outputs by
the width in training, and batch norms have no running statistics. The server averages each coordinate over the clients
that have it. A model predicts by its last exit.

Departures from the authors' code:

- A capacity of c gives ``floor(c L)`` of L blocks, at least one; the code gives each number of blocks to a share of the
  clients, drawn once, as `federation.capacities` [0.25, 0.5, 0.75, 1] does in turn.
- The last exit is chosen in the weights: its last linear layer is multiplied by L, and those of the others are zero,
  since the module predicts the mean over all L exits.
- Layers divide their outputs in training only, as in HeteroFL; a batch norm behind them makes both ways equal up to its
  epsilon. The code divides in evaluation too.
- The coordinates of a network follow from the units of the module. The code finds them by the gradients of a model with
  equal weights.
- The default of `strength` is the code's value for BERT; the code's own default is 0, without this part of the method.
- The learning rates of the code fall in steps, and weights decay: `trainer.round_lr` and the module's optimizer.
- The code logs the mean accuracy of all exits of a network as that of its last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.algorithms._early_exits import places, predicting
from lightning_sparsefl.callbacks.exits import TaughtExits, require_exits
from lightning_sparsefl.callbacks.width import OutputScaler
from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import make_norms_static, ranked_units
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    FitResult,
    Masks,
    Merged,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class ScaleFL(FederatedAlgorithm):
    """Clients train the first blocks of a model with early exits, and the first channels of their layers."""

    widths: tuple[float, ...] = (0.7, 0.7, 0.75, 1.0)
    """Width of networks with 1, 2, ... blocks, in (0, 1], one for each block of the model."""
    scaler: bool = True
    """Whether layers divide their outputs by the width in training."""
    strength: float = 0.05
    """Strength of the term by which a network's last exit teaches the others (gamma), >= 0."""
    temperature: float = 3.0
    """Temperature of the probabilities in this term (T), above 0."""
    warmup: float = 0.25
    """Fraction of the rounds after which the term acts, in [0, 1]."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        fits = bool(self.widths) and all(0 < width <= 1 for width in self.widths)
        require(fits, "algorithm.widths", self.widths, "one or more numbers in (0, 1]")
        require(self.strength >= 0, "algorithm.strength", self.strength, "a number >= 0")
        require(self.temperature > 0, "algorithm.temperature", self.temperature, "a number above 0")
        require(0 <= self.warmup <= 1, "algorithm.warmup", self.warmup, "a number in [0, 1]")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of all blocks."""
        return "trains all blocks on every client"

    def adapt(self, module: LightningModule) -> None:
        """Refuse modules without exits, and remove the running statistics of batch norms."""
        require_exits(module, "`algorithm` is ScaleFL, which")
        make_norms_static(module)

    @property
    def follows_length(self) -> bool:  # type: ignore[override]
        """Whether the term acts from a fraction of the rounds on."""
        return bool(self.strength and self.warmup)

    # ---- the server

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Compute the masks of each network, and choose the last exit."""
        exits = len(fleet.exits)
        expected = f"{exits} numbers, one for each block of `model`"
        require(len(self.widths) == exits, "algorithm.widths", self.widths, expected)
        parameters = {name: value for name, value in weights.items() if name not in fleet.buffers}
        found = places(parameters, fleet)
        networks = {
            f"network {depth}": self._network(depth, parameters, found["blocks"], fleet)
            for depth in range(1, exits + 1)
        }
        theta = {name: weights[name] for name in found["heads"]}
        return self._shown(ServerState(round=0, weights=weights, extra={**found, **networks, "theta": theta}))

    def _network(self, depth: int, parameters: Weights, blocks: Weights, fleet: Fleet) -> Masks:
        """Return the masks of the network with a number of blocks."""
        units = self._units(fleet, depth)
        narrow = {} if units is None else unit_masks(fleet.units, units, parameters)
        deeper = [name for name, block in blocks.items() if block >= depth]
        return {**narrow, **{name: torch.zeros_like(parameters[name], dtype=torch.bool) for name in deeper}}

    def _units(self, model: Client | Fleet, depth: int) -> Masks | None:
        """Return the units of the network with a number of blocks; None for all."""
        width = self.widths[depth - 1]
        return ranked_units(model.units, width, "ordered", rounding="down") if width < 1 else None

    def _shown(self, server: ServerState) -> ServerState:
        """Return the state with weights that predict by the last exit."""
        factors = _chosen(server, len(self.widths))
        return replace(server, weights=predicting(self.weights_to_step(server), factors))

    def weights_to_step(self, server: ServerState) -> Weights:
        """Return the weights with the last layers of all exits."""
        return {**server.weights, **server.extra["theta"]}

    def alike(self, server: ServerState, view: ClientView) -> int:
        """Return the number of the client's blocks."""
        return max(1, floor_count(view.capacity, len(self.widths)))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's network, the number of its blocks, and what last layers are multiplied by for scores."""
        depth = self.alike(server, view)
        masks: Masks = server.extra[f"network {depth}"]
        extra = {"depth": {"blocks": torch.tensor(depth)}, "heads": _chosen(server, depth)}
        return Message(weights=apply(self.weights_to_step(server), masks), masks=masks, extra=extra)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Return the mean of each coordinate over the clients that have it."""
        mean = super().aggregate(replace(server, weights=self.weights_to_step(server)), merged)
        theta = {name: mean.weights[name] for name in server.extra["theta"]}
        return self._shown(replace(mean, extra={**mean.extra, "theta": theta}))

    # ---- a client

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the limit on depth with the exits' common loss, and the scaling of hidden layers."""
        depth = int(message.extra["depth"]["blocks"])
        strength = self.strength if client.round > self.warmup * client.max_rounds else 0.0
        found: list[Callback] = [TaughtExits(depth, strength, self.temperature)]
        if self.scaler and self.widths[depth - 1] < 1:
            layers = dict.fromkeys(name for group in client.units for name in group.layers)
            found.append(OutputScaler(layers, self.widths[depth - 1]))
        return found

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's network."""
        result = self._fit(message, client)
        return Update(weights=result.weights, metrics=result.metrics)

    def _fit(self, message: Message, client: Client, epochs: int | None = None) -> FitResult:
        depth = int(message.extra["depth"]["blocks"])
        deeper = {name: mask for name, mask in message.masks.items() if not bool(mask.any())}
        callbacks, units = self.callbacks(message, client), self._units(client, depth)
        return client.fit(message.weights, deeper, callbacks=callbacks, epochs=epochs, units=units)

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return weights that predict by the client's last exit."""
        return predicting(message.weights, message.extra["heads"])

    def finetune_for(self, message: Message, client: Client, epochs: int) -> Weights:
        """Train the client's network."""
        return predicting(self._fit(message, client, epochs).weights, message.extra["heads"])

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the trained weights, which predict by the client's last exit."""
        return predicting({**message.weights, **update.weights}, message.extra["heads"])

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the client's network, including those of its biases."""
        return super().costs(narrow_facts(facts))


def _chosen(server: ServerState, depth: int) -> Weights:
    """Return the factor of each last layer, so that the mean over all exits is the logits of one."""
    heads = server.extra["heads"]
    count = max(map(int, heads.values())) + 1
    return {
        name: torch.tensor(float(count) if int(block) == depth - 1 else 0.0, dtype=torch.float64)
        for name, block in heads.items()
    }
