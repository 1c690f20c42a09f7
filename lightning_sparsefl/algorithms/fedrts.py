"""FedRTS: Federated Robust Pruning via Combinatorial Thompson Sampling.

Huang, Yang, Chen, Ye, Wu, NeurIPS 2025, arXiv:2501.19122.

The server has one mask, and for each weight a beta distribution of the probability that it belongs to the mask. Every
round, clients send which weights are the largest of their model, and every R rounds which pruned weights have the
largest gradients. Both are evidence for the distributions, from which the server then draws the next mask.

Departures from the paper and the authors' code:

- Clients send which of the kept weights are the largest of their model, one bit each, and in adjustments one bit for
  each other weight. In the code the server, which sees each model, finds the former by itself, and clients send the
  indices of the latter; here it sees sums over clients only.
- The first mask keeps the largest weights with the densities of ERK, as in the code, where `density` is that of all
  parameters, of which biases and norms stay dense.
- The number of weights that a round would exchange is at most that of the dead ones; in the code, only in adjustments.
- In the code the fraction to exchange grows again after `adjust_until`, where nothing is exchanged; here it is 0.
- Draws depend on the run's seed and the round. Ties are broken by the index.
- The gradients are those of one training batch in evaluation mode.
- Distributions are never discounted, as in the paper, so masks hardly change late in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import derive_seed
from lightning_sparsefl.sparse.adjust import beta_draws, exchanged
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import apply, counts
from lightning_sparsefl.sparse.prune import keep_largest_among, prune_to, shrink
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.sparse.scores import gradient, magnitude
from lightning_sparsefl.types import CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights

_CORE, _GROWTH = "core", "growth"


@dataclass(frozen=True, kw_only=True)
class FedRTS(FederatedAlgorithm):
    """One global mask, drawn from beta distributions that the clients' largest weights and gradients update."""

    density: float = 0.1
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    exchange: float = 0.2
    """Fraction of a layer's kept weights that are not in its core at first (alpha_0), in [0, 1]; falls by a cosine."""
    adjust_every: int = 10
    """Number of rounds between two draws of the mask (R)."""
    adjust_until: int = 300
    """Last round with a draw."""
    trust: float = 0.5
    """Weight of the clients' votes against the server's own (gamma), in [0, 1]."""
    evidence: float = 10.0
    """Amount by which one round changes a distribution (lambda), > 0."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        for name in ("exchange", "trust"):
            require(0 <= getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in [0, 1]")
        require(self.evidence > 0, "algorithm.evidence", self.evidence, "a number above 0")
        for name in ("adjust_every", "adjust_until"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "a whole number >= 1")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Keep the largest initial weights, as many of each layer as ERK says, with uniform distributions."""
        pool = fleet.prunable(weights, self.dense_layers)
        masks = prune_to(magnitude(pool), kept_counts(pool, erk(pool, self.density)))
        ones = {name: torch.ones_like(value) for name, value in pool.items()}
        extra = {"alpha": ones, "beta": dict(ones), "plan": {"seed": torch.tensor(fleet.seed, device=fleet.device)}}
        return ServerState(round=0, weights=apply(weights, masks), masks=masks, extra=extra)

    def numbers(self, masks: Masks, round: int) -> dict[str, int]:
        """Return how many kept weights of each layer are not in its core in a round.

        Args:
            masks: Masks of what is kept.
            round: Number of the round, from 0.
        """
        rate = 0.0 if round > self.adjust_until else cosine(self.exchange, round, self.adjust_until + 1)
        return exchanged(masks, rate)

    def adjusts(self, round: int) -> bool:
        """Return whether a new mask is drawn after a round.

        Args:
            round: Number of the round, from 0.
        """
        return round % self.adjust_every == 0 and 0 < round <= self.adjust_until

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, and send where the largest weights are, and the largest gradients if it is due."""
        update, masks = super().train(message, client), message.masks
        numbers = self.numbers(masks, client.round)
        extra = {_CORE: _core(update.weights, masks, numbers)}
        if self.adjusts(client.round):
            slopes = gradient(client.gradient(update.weights))
            extra[_GROWTH] = {name: keep_largest_among(slopes[name], ~m, numbers[name]) for name, m in masks.items()}
        return replace(update, extra=extra)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge the updates and the evidence, and draw a mask if it is due; new weights start at zero."""
        mean, masks = super().aggregate(server, merged), server.masks
        if _CORE not in merged.extra:
            return mean
        own, due = _core(mean.weights, masks, self.numbers(masks, server.round)), _GROWTH in merged.extra
        alpha, beta = dict(server.extra["alpha"]), dict(server.extra["beta"])
        for name, mask in masks.items():
            outcome = (1 - self.trust) * own[name] + self.trust * merged.extra[_CORE][name]
            seen = mask
            if due:
                hope = (1 - self.trust) / 2 + self.trust * merged.extra[_GROWTH][name]
                outcome, seen = torch.where(mask, outcome, hope), torch.ones_like(mask)
            alpha[name] = alpha[name] + self.evidence * outcome * seen
            beta[name] = beta[name] + self.evidence * (1 - outcome) * seen
        if due:
            seed = derive_seed(int(server.extra["plan"]["seed"]), server.round, "FedRTS mask")
            masks = prune_to(beta_draws(alpha, beta, seed), counts(masks))
        extra = {**server.extra, "alpha": alpha, "beta": beta}
        return replace(mean, weights=apply(mean.weights, masks), masks=masks, extra=extra)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with one bit for each kept weight, and in adjustments for each other position and a new mask."""
        costs, masks = super().costs(facts), facts.message.masks
        kept, size = sum(counts(masks).values()), sum(mask.numel() for mask in masks.values())
        due, changed = self.adjusts(facts.view.round), self.adjusts(facts.view.round - 1)
        search = due * min(facts.batch_size, facts.samples) * 3 * forward_flops(facts.layers)
        return replace(
            costs,
            flops_analytic=costs.flops_analytic + search,
            bytes_down_paper=costs.bytes_down_paper + changed * size / 8,
            bytes_up_paper=costs.bytes_up_paper + (size if due else kept) / 8,
        )


def _core(weights: Weights, masks: Masks, numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the masks without their smallest weights."""
    sizes = {name: kept - numbers[name] for name, kept in counts(masks).items()}
    return shrink(magnitude({name: weights[name] for name in masks}), masks, sizes)
