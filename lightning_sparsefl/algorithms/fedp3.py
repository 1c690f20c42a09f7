"""FedP3: Federated Personalized and Privacy-friendly Network Pruning under Model Heterogeneity.

Yi, Gazagnadou, Richtarik, Lyu, ICLR 2024, arXiv:2404.09816, Algorithm 1.

Each client owns some of the hidden layers, always the same ones. The server sends these dense, and the other layers
pruned to their largest weights. The client trains the whole model, and sends its own layers and the last one; the
server takes the mean of each layer over those who own it. A client is scored with the model that it trained last.
FedP3 is a row of FedLPS (arXiv:2412.07216, Table I).

Departures from the paper and the authors' code:

- The sets follow the rules LowerB, OPU2 and OPU3 of the paper; its random sets (OPR) are not implemented.
- Weights that arrive as zeros train like the others, as in the code.
- The paper lets a client prune further, at random or by order, in a width drawn from an interval; the public code does
  not. Here a width is drawn once a round for all hidden matrices, and what is left out keeps its value.
- In the last round of the code the clients train only the last layer, for ten epochs; see `federation.finetune_epochs`.
- Each hidden layer needs an owner, so that few clients need a larger `owned`.
- Hidden layers are found as in PerFedMask; the code lists the four of its network by hand, for 25 clients each.
- The mean over owners is uniform, the code's default; the weights of its `weighted_mean` do not sum to 1.
- ``flops/paper`` is that of the density that arrives; ``flops/train`` is dense, since zeros become weights; both are
  scaled by the mean local width. `profile` has the masks of the first weights in all rounds, and so misses the bytes of
  masks that change in training.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count, maskable
from lightning_sparsefl.sparse.layer_groups import head_of, layer_groups
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.sparse.prune import keep_largest, share_masks
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedP3(FederatedAlgorithm):
    """Each client owns some layers, which it receives dense and sends; it receives the others pruned."""

    owned: int = 2
    """Number of consecutive hidden layers that a client owns: 1 is the paper's LowerB, 2 its OPU2, 3 its OPU3."""
    keep: float = 0.9
    """Fraction of a tensor's weights that is sent to clients that do not own it, in (0, 1]; biases are sent whole."""
    head: Literal["own", "shared"] = "own"
    """Whether a client keeps its own last layer, though it is sent and averaged (the code), or receives the mean."""
    local_pruning: Literal["fixed", "uniform", "ordered"] = "fixed"
    """What a client trains: the model as it arrives, randomly drawn weights of it, or its first rows and columns."""
    local_width: float = 0.7
    """Smallest width that a client draws for its local pruning, in (0, 1]; the largest is 1."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.owned >= 1, "algorithm.owned", self.owned, "a whole number >= 1")
        for name in ("keep", "local_width"):
            require(0 < getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in (0, 1]")

    @property
    def sends_unreceived(self) -> str | None:
        """The last layer of each client."""
        if self.head == "shared":
            return None
        return "has clients send more than they received, unless `algorithm.head` is 'shared'"

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the hidden layers, which blocks of clients own in turn."""
        parameters = without(weights, fleet.buffers)
        head = dict.fromkeys(head_of(parameters, uses=fleet.uses, named=None), torch.tensor(True))
        hidden = layer_groups(without(parameters, head))
        if not hidden:
            raise InvalidOption("`algorithm` is FedP3, and the model has no layer below the last; use FedPer.")
        layers = {name: torch.tensor(number) for number, names in enumerate(hidden.values()) for name in names}
        count, total = len(hidden), max(view.id for view in fleet.views) + 1
        firsts = {self._first(view.id, count, total) for view in fleet.views}
        owned = set().union(*(self._owned(first, count) for first in firsts))
        if len(owned) < count:
            raise InvalidOption(
                f"`algorithm.owned` is {self.owned}, so that {len(fleet)} clients own {len(owned)} of the {count} "
                "hidden layers, and the server would never train the others; raise `algorithm.owned`."
            )
        clients = {"count": torch.tensor(total)}
        return ServerState(round=0, weights=weights, extra={"layer": layers, "head": head, "clients": clients})

    def layers(self, server: ServerState, view: ClientView) -> set[int]:
        """Return the numbers of the hidden layers that a client owns.

        Args:
            server: State of the server in any round.
            view: View of the client.
        """
        count = 1 + max(int(number) for number in server.extra["layer"].values())
        return self._owned(self._first(view.id, count, int(server.extra["clients"]["count"])), count)

    def _first(self, client: int, count: int, clients: int) -> int:
        return min(client * count // clients, count - 1)

    def _owned(self, first: int, count: int) -> set[int]:
        return {(first + place) % count for place in range(min(self.owned, count))}

    def equal_costs(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the layers that the client owns."""
        return frozenset(self.layers(server, view))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send owned layers dense and the others pruned; only tensors of others have masks."""
        owned, weights = self.layers(server, view), server.weights
        layers = {name: int(number) for name, number in server.extra["layer"].items()}
        masks = {name: self._largest(weights[name]) for name, number in layers.items() if number not in owned}
        # a product would send -0.0 for negative weights, and they train; decoded messages have 0.0
        sent = {**weights, **{name: weights[name].masked_fill(~mask, 0) for name, mask in masks.items()}}
        return Message(weights=without(sent, server.extra["head"]) if self.head == "own" else sent, masks=masks)

    def _largest(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the mask of a tensor's largest weights; all of a bias."""
        size = weight.numel()
        count = min(size, max(1, floor_count(self.keep, size))) if weight.dim() > 1 else size
        return keep_largest(weight.abs(), count)

    def may_vote(self, message: Message) -> Masks:
        """Return no masks, since a client votes on all of what it sends."""
        return {}

    def train(self, message: Message, client: Client) -> Update:
        """Train the whole model, or a part of it, pruned weights included; send owned layers and the last one."""
        start = {**client.memory.get("weights", client.initial), **message.weights}
        masks = self._local_masks(start, client)
        result = client.fit(start, masks, callbacks=self.callbacks(message, client))
        left_out = {name: torch.where(mask, result.weights[name], start[name]) for name, mask in masks.items()}
        trained = {**result.weights, **left_out}
        return Update(
            weights=without(trained, message.masks), weight=1, memory={"weights": trained}, metrics=result.metrics
        )

    def _local_masks(self, weights: Weights, client: Client) -> Masks:
        """Draw what the client trains of its hidden matrices."""
        if self.local_pruning == "fixed":
            return {}
        parameters, rng = without(weights, client.buffers), client.rng("local pruning")
        hidden = without(parameters, head_of(parameters, uses=client.uses, named=None))
        width = self.local_width + (1 - self.local_width) * float(torch.rand((), generator=rng))
        matrices = {name: hidden[name] for name in maskable(hidden)}
        return share_masks(matrices, width, rng if self.local_pruning == "uniform" else None)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the model that the client keeps."""
        weights: Weights = (update.memory or {})["weights"]
        return weights

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the model that the client trained last, or the received one if it never took part."""
        weights: Weights = client.memory.get("weights", {**client.initial, **message.weights})
        return weights

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs in which owned layers and the last one travel up, and training is dense by analysis."""
        masks, parameters = facts.message.masks, without(facts.model.initial, facts.buffers)
        up = sum(weight.numel() for weight in without(parameters, masks).values())
        head = head_of(parameters, uses=facts.model.uses, named=None)
        last = forward_flops([layer for layer in facts.layers if layer.weight in head])
        hidden = [layer for layer in facts.layers if layer.weight not in head]
        passes, q = 3 * facts.epochs * facts.samples, self.local_width
        share = {"fixed": 1.0, "uniform": (1 + q) / 2, "ordered": (1 + q + q**2) / 3}[self.local_pruning]  # E p, E p^2
        return replace(
            super().costs(facts),
            flops_paper=passes * (share * forward_flops(hidden, masks) + last),
            flops_analytic=passes * (share * forward_flops(hidden) + last),
            bytes_up_paper=BYTES_PER_WEIGHT * up,
        )
