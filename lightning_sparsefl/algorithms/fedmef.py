"""FedMef: Towards Memory-efficient Federated Dynamic Pruning.

Huang, Zhuang, Chen, Lyu, CVPR 2024, arXiv:2403.14737. Its adjustment of the mask is that of FedTiny: Distributed
Pruning Towards Tiny Neural Networks in Federated Learning (Huang, Zhang, Sun, Fang, Yuan, Wu, ICDCS 2023,
arXiv:2212.01977).

The server has one mask. Every R rounds, clients send the largest gradients of pruned weights; the server drops the
smallest weights of each layer and grows as many where the mean gradient is largest. Clients penalize their smallest
weights, which are about to be pruned, at a raised learning rate (budget-aware extrusion), and may save pruned
activations for the backward pass (scaled activation pruning). ``penalty=0`` without `activation_density` is FedTiny.

Departures from the papers and their authors' code:

- The penalty is on the smallest *kept* weights. The code ranks all entries, so that below a density of one half it
  penalizes zeros, which changes nothing. The penalized weights are chosen once per fit, and in every round, as in the
  code; the paper trains with the penalty just before it prunes. Their number falls by a cosine to 0 in round
  `adjust_until`, as in the code, where it grows again after that round; here it stays 0.
- The learning rate follows the formula at each step; in the code it never decreases, `max_lr` is 0.01, and the strength
  of the penalty is 1 whatever its option says.
- FedTiny's progressive pruning of one block at a time, and its choice of a first mask by batch statistics, are not
  offered. The first mask keeps the largest weights with the densities of ERK; FedMef's paper draws it.
- `density` is that of the layers with masks; in the code that of all parameters, of which biases and norms stay dense.
- Activations are pruned without the paper's normalized convolutions, as in the code.
- Growth is decided by the magnitude of the mean of signed gradients, in which a weight that a client did not send
  counts as zero. A weight that is dropped in the same round has no gradients, so it returns only if too few others do.
- The gradients are those of one training batch in evaluation mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.callbacks import ActivationPruning, BudgetAwareExtrusion
from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.adjust import adjusted, exchanged
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.prune import keep_largest_among, prune_to
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import CostFacts, Costs, Merged, Message, ServerState, Update, Weights

_GROWTH = "growth"
_ENTRY_BYTES = 8
"""Bytes of a gradient and its index."""


@dataclass(frozen=True, kw_only=True)
class FedMef(FederatedAlgorithm):
    """One global mask that the server adjusts by the clients' largest gradients, with a penalty before pruning."""

    density: float = 0.1
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    exchange: float = 0.2
    """Fraction of a layer's kept weights that is exchanged at first (alpha), in [0, 1]; it falls by a cosine."""
    adjust_every: int = 10
    """Number of rounds between two adjustments (R)."""
    adjust_until: int = 300
    """Last round with adjustments, whose rate falls to almost 0 until then."""
    penalty: float = 0.01
    """Strength of the penalty on the smallest weights (lambda), >= 0; 0 = neither penalty nor raised rates: FedTiny."""
    penalized: float = 0.5
    """Fraction of a layer's kept weights that is penalized at first (gamma), in [0, 1]; it falls by a cosine."""
    psi: float = 1.0
    """Factor of the raised learning rate, >= 0."""
    max_lr: float = 0.1
    """Upper bound of the learning rate, > 0, also of the module's own, unless `penalty` is 0."""
    activation_density: float | None = None
    """Fraction of a layer's inputs that is saved for the gradients of weights, in (0, 1]; null = all."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        for name in ("exchange", "penalized"):
            require(0 <= getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in [0, 1]")
        for name in ("penalty", "psi"):
            require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), "a number >= 0")
        require(self.max_lr > 0, "algorithm.max_lr", self.max_lr, "a number above 0")
        for name in ("adjust_every", "adjust_until"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "a whole number >= 1")
        kept = self.activation_density
        require(kept is None or 0 < kept <= 1, "algorithm.activation_density", kept, "a number in (0, 1], or null")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Keep the largest initial weights, as many of each layer as ERK says."""
        pool = fleet.prunable(weights, self.dense_layers)
        masks = prune_to(magnitude(pool), kept_counts(pool, erk(pool, self.density)))
        return ServerState(round=0, weights=apply(weights, masks), masks=masks)

    def rate(self, round: int) -> float:
        """Return the fraction of a layer's kept weights that is exchanged after a round; 0 = no adjustment.

        Args:
            round: Number of the round, from 0.
        """
        if round % self.adjust_every or not 0 < round <= self.adjust_until:
            return 0.0
        return cosine(self.exchange, round, self.adjust_until + 1)

    def share(self, round: int) -> float:
        """Return the fraction of a layer's kept weights that is penalized in a round.

        Args:
            round: Number of the round, from 0.
        """
        return cosine(self.penalized, round, self.adjust_until + 1)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the penalty and the pruning of activations."""
        masks, found = message.masks, list[Callback]()
        if self.penalty:
            share = self.share(client.round)
            found.append(BudgetAwareExtrusion(self.penalty, share, self.psi, self.max_lr, masks=masks))
        if self.activation_density is not None:
            found.append(ActivationPruning(self.activation_density))
        return found

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask; in a round with an adjustment, send the largest gradients of pruned weights too."""
        update, rate = super().train(message, client), self.rate(client.round)
        if not rate:
            return update
        slopes, numbers = client.gradient(update.weights), exchanged(message.masks, rate)
        return replace(
            update, extra={_GROWTH: {n: _largest(slopes[n], ~m, numbers[n]) for n, m in message.masks.items()}}
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge the updates, and exchange weights in a round with an adjustment; grown weights start at zero."""
        mean = super().aggregate(server, merged)
        if _GROWTH not in merged.extra:
            return mean
        numbers = exchanged(server.masks, self.rate(server.round))
        kept, masks = adjusted(magnitude(mean.weights), magnitude(merged.extra[_GROWTH]), server.masks, numbers)
        return replace(mean, weights=apply(mean.weights, kept), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with the gradients that an adjustment needs, and one bit for each position of a new mask."""
        costs, masks = super().costs(facts), facts.message.masks
        rate, changed = self.rate(facts.view.round), self.rate(facts.view.round - 1)
        sent = sum(exchanged(masks, rate).values()) if rate else 0
        search = bool(rate) * min(facts.batch_size, facts.samples) * 3 * forward_flops(facts.layers)
        bits = sum(mask.numel() for mask in masks.values()) / 8
        return replace(
            costs,
            flops_analytic=costs.flops_analytic + search,
            bytes_down_paper=costs.bytes_down_paper + bool(changed) * bits,
            bytes_up_paper=costs.bytes_up_paper + _ENTRY_BYTES * sent,
        )


def _largest(slope: Tensor, dead: Tensor, count: int) -> Tensor:
    """Return the gradients of largest magnitude among pruned weights, and zeros elsewhere."""
    return slope * keep_largest_among(slope.abs(), dead, count)
