"""FedDST: Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning Better.

Bibikar, Vikalo, Wang, Chen, AAAI 2022, arXiv:2112.09824.

The server has one ERK mask. In some rounds of the first half of the run, each client drops the smallest weights of each
layer after training, grows as many where the gradient is large, and sends its weights under its new mask. The server
averages each weight over the clients that keep it, and prunes each layer to its number of weights by magnitude.

Departures from the paper and the authors' code:

- The first mask is drawn at random. The code keeps the largest first weights: ``first="magnitude"``.
- The densities of layers are those of ERK. The code scales ERK's sparsities instead, so that large layers have about
  the same density.
- A client drops the same share of a layer in every search, as in the code, whose cosine only decides when searches end.
  The paper's cosine: ``annealing="cosine"``.
- Weights grow where there was none before; the code ranks all positions, and sets kept weights to zero. A layer
  exchanges no more weights than it has places for.
- The gradient of the search is that of one training batch in evaluation mode; the code takes the last batch of the fit.
- Clients are drawn without replacement, and the loss is the module's own; the code applies softmax twice.
- Grown weights are zero when the server prunes by magnitude, unless `epochs_after_search` lets clients train them. Of
  equal magnitudes, those that more clients keep stay, then those of lower index.
- `min_votes` counts clients; in the code, samples.
- The paper's linear path to another density at the end is not offered.
- FedDIP's row keeps masks per client, takes the plain mean and prunes by its own schedule. Its cells use the method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import ceil_count, erk, kept_counts
from lightning_sparsefl.sparse.masks import apply, counts
from lightning_sparsefl.sparse.prune import keep_largest_by, prune_to, shrink
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.sparse.rescale import fan_in_scale
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.sparse.scores import gradient, magnitude
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights

_SEARCH, _RATE = "search", "rate"
"""Keys of the message's extra tree in rounds with a search."""


@dataclass(frozen=True, kw_only=True)
class FedDST(FederatedAlgorithm):
    """One global mask that clients search and the server merges by their votes."""

    density: float = 0.2
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    exchange: float = 0.01
    """Fraction of a layer's kept weights that a search exchanges (alpha_0), in [0, 1)."""
    annealing: Literal["constant", "cosine"] = "constant"
    """Whether the exchanged fraction is constant or falls by a cosine until the last search."""
    search_every: int = 20
    """Number of rounds between two searches, the first one in round 1."""
    search_until: float = 0.5
    """Fraction of the run after which masks do not change, in [0, 1]."""
    epochs_after_search: int = 0
    """Number of additional local epochs under a client's new mask."""
    min_votes: int = 1
    """Number of clients that must keep a weight for it to stay."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""
    first: Literal["random", "magnitude"] = "random"
    """First mask: drawn at random, or of the largest first weights of each layer (the code)."""
    rescale: bool = False
    """Whether to multiply the first weights of each output by the root of its fan-in over the kept part of it, without
    which a sparse network without norms may not start to learn; not in the paper."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(0 <= self.exchange < 1, "algorithm.exchange", self.exchange, "a number in [0, 1)")
        require(0 <= self.search_until <= 1, "algorithm.search_until", self.search_until, "a number in [0, 1]")
        for name, least in (("search_every", 1), ("epochs_after_search", 0), ("min_votes", 1)):
            value = getattr(self, name)
            require(value >= least, f"algorithm.{name}", value, f"a whole number >= {least}")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Make the first mask, which determines the number of weights of every layer for the whole run."""
        pool = fleet.prunable(weights, self.dense_layers)
        goals = self._counts(pool)
        if self.first == "magnitude":
            masks: Masks = prune_to(magnitude(pool), goals)
        else:
            masks = fleet.random_masks(pool, goals, "FedDST mask")
        scale = {name: fan_in_scale(mask) for name, mask in masks.items()} if self.rescale else {}
        first = {name: value * scale[name] if name in scale else value for name, value in weights.items()}
        return ServerState(round=0, weights=apply(first, masks), masks=masks)

    def _counts(self, shapes: Weights) -> dict[str, int]:
        """Return the number of weights that each layer keeps."""
        return kept_counts(shapes, erk(shapes, self.density))

    @property
    def follows_length(self) -> bool:  # type: ignore[override]
        """Whether the rounds with a search, or what they exchange, depend on the rounds of the run."""
        return self.exchange > 0 and (self.annealing == "cosine" or self.search_until < 1)

    def rate(self, round: int, max_rounds: int) -> float:
        """Return the fraction of a layer's kept weights that is exchanged in a round; 0 = no search.

        Args:
            round: Number of the round, from 0.
            max_rounds: Number of rounds of the run.
        """
        last = self.search_until * max_rounds
        if round % self.search_every != 1 % self.search_every or not 1 <= round < last:
            return 0.0
        return cosine(self.exchange, round, int(last) + 1) if self.annealing == "cosine" else self.exchange

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the model under the mask, with the fraction to exchange in rounds with a search."""
        message, rate = super().download(server, view), self.rate(view.round, view.max_rounds)
        extra = {_SEARCH: {_RATE: torch.tensor([rate], dtype=torch.float64)}}
        return replace(message, extra=extra) if rate else message

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the model under the mask."""
        return super().download(server, view)

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, and search for a better one if it is due."""
        masks = message.masks
        result = client.fit(message.weights, masks, callbacks=self.callbacks(message, client))
        weights, metrics = result.weights, result.metrics
        if _SEARCH in message.extra:
            goals = self._counts(masks)
            left = {
                name: alive
                - min(ceil_count(float(message.extra[_SEARCH][_RATE]), alive), masks[name].numel() - goals[name])
                for name, alive in counts(masks).items()
            }
            kept = shrink(magnitude(weights), masks, left)
            slopes = {name: slope for name, slope in client.gradient(weights).items() if name in masks}
            masks, weights = regrow(gradient(slopes), kept, goals, barred=masks), apply(weights, kept)
            if self.epochs_after_search:
                callbacks = self.callbacks(message, client)
                weights = client.fit(weights, masks, callbacks=callbacks, epochs=self.epochs_after_search).weights
        return Update(weights=weights, weight=client.num_examples, votes=masks, metrics=metrics)

    def may_vote(self, message: Message) -> Masks:
        """Return where an upload may vote: anywhere after a search."""
        return {} if _SEARCH in message.extra else super().may_vote(message)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Keep the weights with enough votes, and prune each layer to its number of weights."""
        mean, goals, masks = super().aggregate(server, merged), self._counts(server.masks), {}
        if not merged.clients:
            return mean
        for name, old in server.masks.items():
            votes = merged.voters.get(name, torch.full_like(old, merged.clients, dtype=torch.int32))
            voted = votes >= min(self.min_votes, merged.clients)
            count = min(goals[name], int(voted.sum()))
            masks[name] = keep_largest_by(mean.weights[name].abs(), votes, voted, count)
        return replace(mean, weights=apply(mean.weights, masks), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with a dense pass over the batch of a search, and one bit for each position of a new mask."""
        rate = self.rate(facts.view.round, facts.view.max_rounds)
        changed = self.rate(facts.view.round - 1, facts.view.max_rounds)
        bits = sum(mask.numel() for mask in facts.message.masks.values()) / 8
        costs = super().costs(replace(facts, epochs=facts.epochs + self.epochs_after_search * bool(rate)))
        search = bool(rate) * min(facts.batch_size, facts.samples) * 3 * forward_flops(facts.layers)
        return replace(
            costs,
            flops_analytic=costs.flops_analytic + search,
            bytes_down_paper=costs.bytes_down_paper + bool(changed) * bits,
            bytes_up_paper=costs.bytes_up_paper + bool(rate) * bits,
        )
