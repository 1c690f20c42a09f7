"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients.

Kim, Yu, Kim, Moon, ICLR 2023; Table I of FedLPS (arXiv:2412.07216).

The model consists of blocks with an exit after each (:mod:`~lightning_sparsefl.models.exits`). A client trains the
first blocks and their exits, in a number that depends on its capacity, by the losses of all of its exits and by a term
in which they learn from each other, whose strength rises over the rounds. FedDyn's linear and proximal terms make
clients agree. The server averages each tensor over the clients that have it. A client is scored with the mean of the
logits of its own exits, and the whole model with the mean over all exits.

Departures from the paper and the authors' code:

- A client's exits are combined in its weights: the last linear layers of its exits are multiplied by L / L_k, and those
  of deeper ones are zero, since the module predicts the mean over all L exits.
- A capacity of c gives ``floor(c L)`` blocks, at least one; the paper assigns 1 to 4 blocks to a quarter of the clients
  each, as do the capacities [0.25, 0.5, 0.75, 1].
- Batch norms use the statistics of the current batch and keep none. The authors average running statistics, but leave
  them out of FedDyn's terms.
- A tensor that no client of a round has keeps its value and its h.
- The term counts all positions of a sequence, also padded ones, which the losses leave out; the paper has images only.
- The learning rate of the paper falls by 0.998 in each round, and weights decay by 0.001: `trainer.round_lr` and the
  module's optimizer.
- The published row of FedLPS (Table I, DepthFL) comes without code, and without the depth of a capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.algorithms._dynamic_regularization import NEEDS_EXACT_MEAN, with_correction
from lightning_sparsefl.algorithms._early_exits import places, predicting
from lightning_sparsefl.callbacks import GradientOffset, ProximalTerm
from lightning_sparsefl.callbacks.exits import EarlyExits, require_exits
from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, is_whole, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.width import make_norms_static
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class DepthFL(FederatedAlgorithm):
    """Clients train the first blocks of a model with early exits, in a number that depends on their capacity."""

    alpha: float = 0.1
    """Strength of FedDyn's terms, >= 0; 0 = a plain mean of each tensor over the clients that have it."""
    distill: bool = True
    """Whether the exits of a client learn from each other."""
    ramp: int = 300
    """Number of rounds over which the strength of that term rises to 1: ``exp(-5 (1 - min(t, ramp) / ramp)^2)``."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.alpha >= 0, "algorithm.alpha", self.alpha, "a number >= 0")
        require(is_whole(self.ramp, 1), "algorithm.ramp", self.ramp, "a whole number >= 1")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of all blocks."""
        return "trains all blocks on every client"

    @property
    def needs_exact_mean(self) -> str | None:
        """The server's correction, which `alpha` = 0 leaves out."""
        return NEEDS_EXACT_MEAN if self.alpha else None

    def strength(self, round: int) -> float:
        """Return the strength of the exits' learning from each other.

        Args:
            round: Number of the round, from 0.
        """
        return math.exp(-5 * (1 - min(round, self.ramp) / self.ramp) ** 2) if self.distill else 0.0

    def adapt(self, module: LightningModule) -> None:
        """Refuse modules without exits, and remove the running statistics of batch norms."""
        require_exits(module, "`algorithm` is DepthFL, which")
        make_norms_static(module)

    # ---- the server

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the block of each tensor, the last layers of the exits, h = 0, and the number of clients."""
        parameters = {name: value for name, value in weights.items() if name not in fleet.buffers}
        extra = {**places(parameters, fleet), "fleet": {"clients": torch.tensor(len(fleet))}}
        if self.alpha:
            extra["h"] = {name: torch.zeros_like(value) for name, value in parameters.items()}
        return ServerState(round=0, weights=weights, extra=extra)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's blocks and exits, their number, and what the last layers are multiplied by for scores."""
        blocks = {name: int(block) for name, block in server.extra["blocks"].items()}
        most, depth = max(blocks.values()) + 1, self.alike(server, view)
        deeper = [name for name, block in blocks.items() if block >= depth]
        masks = {name: torch.zeros_like(server.weights[name], dtype=torch.bool) for name in deeper}
        own = [name for name, block in server.extra["heads"].items() if int(block) < depth]
        factors = {name: torch.tensor(most / depth, dtype=torch.float64) for name in own}
        extra = {"depth": {"blocks": torch.tensor(depth)}, "heads": factors}
        return Message(weights=apply(server.weights, masks), masks=masks, extra=extra)

    def alike(self, server: ServerState, view: ClientView) -> int:
        """Return the number of the client's blocks."""
        return max(1, floor_count(view.capacity, max(map(int, server.extra["blocks"].values())) + 1))

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Return the mean of each tensor over the clients that have it, corrected by h."""
        mean = super().aggregate(server, merged)
        return with_correction(server, mean, merged, self.alpha) if self.alpha else mean

    # ---- a client

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the limit on depth with the exits' common loss, and FedDyn's terms."""
        found: list[Callback] = [EarlyExits(int(message.extra["depth"]["blocks"]), self.strength(client.round))]
        if self.alpha:
            gradient = client.memory.get("gradient", {})
            found += [GradientOffset({name: -g for name, g in gradient.items()})] if gradient else []
            found.append(ProximalTerm(self.alpha, anchor=message.weights))
        return found

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's blocks; keep g - alpha (w_k - w) of what it holds."""
        result = client.fit(message.weights, message.masks, callbacks=self.callbacks(message, client))
        memory = {"gradient": self._gradient(message, result.weights, client)} if self.alpha else None
        return Update(weights=result.weights, memory=memory, metrics=result.metrics)

    def _gradient(self, message: Message, trained: Weights, client: Client) -> Weights:
        before = client.memory.get("gradient", {})
        held = [name for name in trained if name not in message.masks]
        moved = {n: before.get(n, 0) - self.alpha * (trained[n] - message.weights[n]) for n in held}
        return {**before, **moved}

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return weights whose mean over all exits is the mean over the client's own ones."""
        return predicting(message.weights, message.extra["heads"])

    def finetune_for(self, message: Message, client: Client, epochs: int) -> Weights:
        """Train the client's blocks and exits, without FedDyn's terms."""
        found = self.callbacks(message, client)
        callbacks = [each for each in found if not isinstance(each, GradientOffset | ProximalTerm)]
        trained = client.fit(message.weights, message.masks, callbacks=callbacks, epochs=epochs).weights
        return predicting(trained, message.extra["heads"])

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the trained weights, which predict the mean over the client's exits."""
        return predicting({**message.weights, **update.weights}, message.extra["heads"])

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the client's blocks and exits, including those of their biases."""
        return super().costs(narrow_facts(facts))
