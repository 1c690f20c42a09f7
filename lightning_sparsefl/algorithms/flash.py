"""FLASH: Revisiting Sparsity Hunting in Federated Learning: Why Does Sparsity Consensus Matter?

Babakniya, Kundu, Prakash, Niu, Avestimehr, TMLR 2023, arXiv:2208.13092, in its form SPDST (sensitivity-driven
pre-defined sparse training).

Before the first round, some clients train a sparse model alone. After each epoch they drop the smallest weights of
each layer, and draw as many new ones, more of them in layers whose weights are large on average. The densities that
their layers end with say how sensitive the layers are. The server draws one mask with the mean densities, scaled to
the density of the run, and all rounds train under it.

Departures from the paper and the authors' code:

- The number of kept weights of a layer is exact; the code draws every position by itself. What does not fit into a
  layer grows in the others in proportion to their means; the code spreads it evenly, and leaves a hundredth of a layer
  empty. A layer keeps one weight at least.
- Each epoch of the first stage is a local fit of its own, with new optimizers and schedules; the code has SGD without
  momentum. The part that is dropped falls from epoch to epoch, as the code's does, which lowers it in each step.
- The rounds start from the run's initial weights; the code draws new ones after the first stage.
- Clients count by their numbers of samples, as in FedAvg; the code takes the plain mean.
- FLOPs of the first stage are not charged; its bytes are, to the first round.
- JMWST, in which masks move in every round, and hetero-FLASH, with several densities, are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import ceil_count, floor_count, kept_counts, uniform
from lightning_sparsefl.sparse.masks import apply, counts
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.regrow import growth_counts, regrow
from lightning_sparsefl.sparse.scores import magnitude, random
from lightning_sparsefl.types import Masks, Message, ServerState, Update, Weights

_ALMOST_DENSE = 0.2
"""Sparsity below which a layer with larger weights than the mean layer drops no more than this sparsity."""


@dataclass(frozen=True, kw_only=True)
class FLASH(FederatedAlgorithm):
    """One random mask, whose densities by layer some clients have found, under which all rounds train."""

    density: float = 0.05
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    first_clients: float = 0.1
    """Fraction of the clients that take part in the first stage, in (0, 1]; one client at least."""
    first_epochs: int = 10
    """Number of epochs of the first stage."""
    exchange: float = 0.25
    """Fraction of a layer's kept weights that is dropped after an epoch of the first stage, in [0, 1); it falls
    linearly to 0 at the end of the stage."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("density", "first_clients"):
            require(0 < getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in (0, 1]")
        require(0 <= self.exchange < 1, "algorithm.exchange", self.exchange, "a number in [0, 1)")
        require(self.first_epochs >= 1, "algorithm.first_epochs", self.first_epochs, "a whole number >= 1")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Ask some clients for the densities of the layers, and draw the mask."""
        pool = fleet.prunable(weights, self.dense_layers)
        asked = {"asked": {"clients": torch.tensor(self._asked(fleet), dtype=torch.float64)}}
        first = fleet.random_masks(pool, kept_counts(pool, uniform(pool, self.density)), "FLASH first mask")
        answer = fleet.survey(Message(weights={}, masks=first, extra=asked)).extra["densities"]
        densities = {name: float(answer[name]) for name in pool}  # too small, since who is not asked counts as 0
        kept = sum(densities[name] * value.numel() for name, value in pool.items())
        scale = self.density * sum(value.numel() for value in pool.values()) / kept
        numbers = kept_counts(pool, {name: min(1.0, scale * share) for name, share in densities.items()})
        masks = fleet.random_masks(pool, numbers, "FLASH mask")
        return ServerState(round=0, weights=apply(weights, masks), masks=masks)

    def _asked(self, fleet: Fleet) -> list[int]:
        """Return the numbers of the clients that take part in the first stage."""
        drawn = torch.randperm(len(fleet.views), generator=generator(fleet.seed, "FLASH clients"))
        return [fleet.views[int(place)].id for place in drawn[: max(1, floor_count(self.first_clients, len(drawn)))]]

    def survey(self, message: Message, client: Client) -> Update:
        """Train a sparse model alone, and return the densities of its layers, unless other clients are asked."""
        if client.id not in message.extra["asked"]["clients"].tolist():
            return Update(weights={})
        weights: Weights = {}
        masks = message.masks
        for epoch in range(self.first_epochs):
            if epoch:
                rate = self.exchange * (1 - epoch / self.first_epochs)
                masks = self._moved(weights, masks, rate, client)
            weights = client.fit(weights, masks, epochs=1).weights
        densities = {name: mask.double().mean() for name, mask in masks.items()}
        return Update(weights={}, extra={"densities": densities})

    def _moved(self, weights: Weights, masks: Masks, rate: float, client: Client) -> Masks:
        """Return the masks with small weights dropped, and as many new ones in layers whose weights are large."""
        held = counts(masks)
        worth = {name: float(weights[name].double().abs().sum()) / held[name] for name in masks}
        mean, left = sum(worth.values()) / len(worth), {}
        for name, mask in masks.items():
            sparsity = 1 - held[name] / mask.numel()
            spared = sparsity < _ALMOST_DENSE and worth[name] > mean
            left[name] = max(1, held[name] - ceil_count(min(sparsity, rate) if spared else rate, held[name]))
        room = {name: mask.numel() - left[name] for name, mask in masks.items()}
        grown = growth_counts(sum(held.values()) - sum(left.values()), worth, room)
        drawn = random(masks, client.rng("FLASH growth"))
        scores = {name: score.to(masks[name].device) for name, score in drawn.items()}
        return regrow(scores, shrink(magnitude(weights), masks, left), {n: left[n] + grown[n] for n in left})
