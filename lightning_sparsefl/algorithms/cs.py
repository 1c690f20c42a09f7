"""CS: Complement Sparsification: Low-Overhead Model Pruning for Federated Learning.

Jiang, Borcea, AAAI 2023; a row of Table I of FedLPS, arXiv:2412.07216.

The server sends the largest weights of each layer. A client trains all weights from there, and sends the complement:
the weights that the server has pruned. The server adds their mean, times a factor, to what it has sent, and prunes
again. Down and up together are one dense model, and no mask travels up. The first round is dense.

Departures from the authors' code:

- The last linear layer, biases and norms are never pruned, as in FedLPS's program. The authors' code prunes all
  kernels: ``prune_head=True``.
- Pruning is by magnitude alone. The authors' code runs a step of TensorFlow's pruning on augmented data.
- The server's weights, by which clients are scored, are the pruned ones. FedLPS's program scores before it prunes.
- ``upload="largest"`` with ``kappa=1`` is the row of FedLPS, whose program sends the largest changes of a layer instead
  of the complement, and merges them with zeros for the others.
- ``flops/paper`` counts training at the density of the model that was sent, as FedLPS does. Since pruned weights move
  from the first step on, the hardware trains a dense model, which ``flops/train`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import BYTES_PER_WEIGHT, training_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.sparse.prune import prune_to
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.sparse.uses import TensorUses
from lightning_sparsefl.types import CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class CS(FederatedAlgorithm):
    """The server sends its largest weights, and clients send those that it has pruned."""

    density: float = 0.5
    """Fraction of the weights of a layer that the server sends, in (0, 1]; at 1, clients send none of a pruned layer
    after the first round."""
    kappa: float = 1.5
    """Factor of the mean of what clients send for pruned weights, above 0."""
    prune_head: bool = False
    """Whether the last linear layer is pruned like the others."""
    upload: Literal["complement", "largest"] = "complement"
    """Whether clients send the weights that the server has pruned, or as many of the largest changes (FedLPS)."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(self.kappa > 0, "algorithm.kappa", self.kappa, "a number above 0")

    @property
    def can_be_private(self) -> bool:
        """Whether all clients send the same coordinates: the complement does not depend on their data."""
        return self.upload == "complement"

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights, which are dense, and the number of weights of each layer to keep later."""
        parameters = fleet.trained(weights)
        spared = () if self.prune_head else _spared(parameters, fleet.uses)
        counts = {
            name: torch.tensor(max(1, round(self.density * parameters[name].numel())), dtype=torch.int64)
            for name in fleet.maskable(without(parameters, spared))
        }
        if not counts:
            raise InvalidOption("`CS` finds no layer to prune but the last; set `algorithm.prune_head: true`.")
        return ServerState(round=0, weights=weights, extra={"kept": counts})

    def train(self, message: Message, client: Client) -> Update:
        """Train all weights, and send the complement of what was received, or the largest changes."""
        result = client.fit(message.weights, callbacks=self.callbacks(message, client))  # no masks: all weights move
        moved = subtract(result.weights, message.weights)
        votes = None
        if self.upload == "largest":
            changes = {name: moved[name] for name in message.masks}
            votes = prune_to(magnitude(changes), {n: int((~mask).sum()) for n, mask in message.masks.items()})
        return Update(weights=moved, kind="difference", weight=client.num_examples, votes=votes, metrics=result.metrics)

    def may_vote(self, message: Message) -> Masks:
        """Return the complement of what was sent; everything for the largest changes."""
        return {} if self.upload == "largest" else {name: ~mask for name, mask in message.masks.items()}

    def reducer(self) -> Reducer:
        """Return the mean, in which changes that are not among a client's largest count as zero."""
        return PlainMean() if self.upload == "largest" else CoverageMean()

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Add the mean, times kappa for pruned weights, and prune again."""
        moved = dict(merged.weights)
        for name, mask in server.masks.items():
            moved[name] = torch.where(mask, moved[name], self.kappa * moved[name])
        dense = super().aggregate(server, replace(merged, weights=moved))
        return self._pruned(dense)

    def _pruned(self, server: ServerState) -> ServerState:
        """Return the state with the largest weights of each layer."""
        counts = {name: int(count) for name, count in server.extra["kept"].items()}
        masks = prune_to(magnitude({name: server.weights[name] for name in counts}), counts)
        return replace(server, weights=apply(server.weights, masks), masks=masks)

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the first state, pruned after the first round."""
        return replace(self._pruned(server) if round else server, round=round)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs in which the upload is the complement of the download, and the hardware trains all weights."""
        costs, message = super().costs(facts), facts.message
        kept = {name: int(mask.sum()) for name, mask in message.masks.items()}
        up = sum(w.numel() - kept.get(n, 0) for n, w in message.weights.items() if n not in facts.buffers)
        return replace(
            costs,
            flops_analytic=training_flops(facts.layers, {}, {}, facts.epochs * facts.samples),
            bytes_up_paper=BYTES_PER_WEIGHT * up,
        )


def _spared(parameters: Weights, uses: TensorUses) -> tuple[str, ...]:
    """Return the names of the tensors of the last linear layer, which is not pruned."""
    try:
        return head_of(parameters, uses=uses, named=None)
    except InvalidOption as error:
        raise InvalidOption(f"{error} With `algorithm.prune_head: true`, the last layer is pruned too.") from error
