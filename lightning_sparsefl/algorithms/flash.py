"""FLASH: Revisiting Sparsity Hunting in Federated Learning: Why Does Sparsity Consensus Matter?

Babakniya, Kundu, Prakash, Niu, Avestimehr, TMLR 2023, arXiv:2208.13092, in its forms SPDST (sensitivity-driven
pre-defined sparse training) and JMWST (joint mask weight sparse training), each also as hetero-FLASH.

Before the first round, some clients train a sparse model alone. After each epoch they drop the smallest weights of
each layer, and draw as many new ones, more of them in layers whose weights are large on average. The densities that
their layers end with say how sensitive the layers are. The server draws one mask with the mean densities, scaled to
the density of the run. With SPDST all rounds train under it. With JMWST clients move it by the same rule after each
epoch but the last one, or behind the middle of a single one, and the server keeps the largest weights of each layer, as
many as the mean density of the clients' masks says. With hetero-FLASH a client trains a part of the mask: the largest
weights of each layer, in a number that depends on its capacity.

Departures from the paper and the authors' code:

- The number of kept weights of a layer is exact; the code draws every position by itself. What does not fit into a
  layer grows in the others in proportion to their means; the code spreads it evenly, and leaves a hundredth of a layer
  empty. A layer keeps one weight at least.
- Each epoch of the first stage is a local fit of its own, with new optimizers and schedules; the code has SGD without
  momentum. The part that is dropped falls from epoch to epoch, as the code's does, which lowers it in each step.
- The rounds start from the run's initial weights; the code draws new ones after the first stage.
- In the rounds of SPDST, clients count by their numbers of samples, as in FedAvg, and so they do for buffers with JMWST
  and hetero-FLASH; the code takes the plain mean.
- FLOPs of the first stage are not charged; its bytes are, to the first round.
- The global model of JMWST is scored under its mask; the code scores the mean of all clients' weights before it is
  pruned. The densities are scaled to that of the run also where they are below it, so that rounding lowers none. Rounds
  between two moves train under the mask from their first step on; the code's first step there is dense, but for
  hetero-FLASH.
- With hetero-FLASH a client's capacity holds in all rounds; in the code the ten clients of a round, whoever they are,
  have three times .5, three times .75 and four times all of the density from round 1 on. A weight that nobody trains
  keeps its value with `merge: count` where masks do not move; the code sets it to 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.callbacks.layer_reallocation import LayerReallocation
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.adjust import reallocated
from lightning_sparsefl.sparse.density import floor_count, kept_counts, uniform
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.prune import prune_to, shrink
from lightning_sparsefl.sparse.scores import magnitude, random
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FLASH(FederatedAlgorithm):
    """One mask, whose densities by layer some clients have found, which stays or moves as clients train."""

    density: float = 0.05
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    first_clients: float = 0.1
    """Fraction of the clients that take part in the first stage, in (0, 1]; one client at least."""
    first_epochs: int = 10
    """Number of epochs of the first stage."""
    exchange: float = 0.25
    """Fraction of a layer's kept weights that is dropped after an epoch of the first stage, in [0, 1); it falls
    linearly to 0 at the end of the stage. With JMWST it also falls to 0 over the steps of each local fit."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""
    form: Literal["SPDST", "JMWST"] = "SPDST"
    """Whether the mask stays (SPDST), or clients move it in training (JMWST)."""
    move_every: int = 1
    """Number of rounds from one in which clients move the mask to the next, the first one in round 0; JMWST alone."""
    merge: Literal["mean", "count"] = "mean"
    """Whether weights are averaged over the cohort, or over the clients whose masks keep them; with JMWST or
    `hetero`."""
    sensitivity: Literal["masks", "weights"] = "masks"
    """Whether the layers of a mask that has moved have the mean densities of the clients' masks, or those of the merged
    weights, in proportion (the code's `avg` and `aggregate`, which `hetero` requires there); JMWST alone."""
    hetero: bool = False
    """Whether a client trains only the largest weights of the mask, the fraction of each layer that its capacity says,
    at least one (hetero-FLASH)."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("density", "first_clients"):
            require(0 < getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in (0, 1]")
        require(0 <= self.exchange < 1, "algorithm.exchange", self.exchange, "a number in [0, 1)")
        for name in ("first_epochs", "move_every"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "a whole number >= 1")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Ask some clients for the densities of the layers, and draw the mask."""
        pool = fleet.prunable(weights, self.dense_layers)
        asked = {"asked": {"clients": torch.tensor(self._asked(fleet), dtype=torch.float64)}}
        first = fleet.random_masks(pool, kept_counts(pool, uniform(pool, self.density)), "FLASH first mask")
        answer = fleet.survey(Message(weights={}, masks=first, extra=asked)).extra["densities"]
        masks = fleet.random_masks(pool, self._counts(pool, answer), "FLASH mask")
        return ServerState(round=0, weights=apply(weights, masks), masks=masks)

    def _counts(self, pool: Weights, found: Weights) -> dict[str, int]:
        """Return the number of weights of each layer, in proportion to densities that clients have found."""
        densities = {name: float(found[name]) for name in pool}  # those of the first stage count all clients
        kept = sum(densities[name] * value.numel() for name, value in pool.items())
        scale = self.density * sum(value.numel() for value in pool.values()) / kept
        return kept_counts(pool, {name: min(1.0, scale * share) for name, share in densities.items()})

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
                masks = reallocated(weights, masks, rate, random(masks, client.rng("FLASH growth")))
            weights = client.fit(weights, masks, epochs=1).weights
        return Update(weights={}, extra={"densities": _densities(masks)})

    # ---- hetero-FLASH and JMWST

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the whole mask."""
        return "trains the whole mask on every client" if self.hetero else None

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the weights that the mask keeps, or the largest of them."""
        if not self.hetero:
            return super().download(server, view)
        sizes = {name: int(mask.sum()) for name, mask in server.masks.items()}
        counts = {name: max(1, floor_count(view.capacity, size)) for name, size in sizes.items()}
        masks = shrink(magnitude(server.weights), server.masks, counts)
        return Message(weights=apply(server.weights, masks), masks=masks)

    @property
    def needs_exact_mean(self) -> str | None:
        """The mean over the cohort, which follows from that over those who keep a weight."""
        needs = self._differ and self.merge == "mean"
        return "scales the mean by the share of the clients that keep a weight (`merge: mean`)" if needs else None

    @property
    def _differ(self) -> bool:
        """Whether the masks of clients may differ."""
        return self.hetero or self.form == "JMWST"

    @property
    def sends_unreceived(self) -> str | None:
        """Weights of the server's mask that a client's part lacks, and to which its mask moves."""
        moves = self.hetero and self.form == "JMWST"
        return "has clients move their masks to weights that they have not received (`hetero`)" if moves else None

    def moves(self, round: int) -> bool:
        """Return whether clients move the mask in a round.

        Args:
            round: Number of the round, from 0.
        """
        return self.form == "JMWST" and round % self.move_every == 0

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, which moves if it is due."""
        if not self._differ:
            return super().train(message, client)
        if not self.moves(client.round):
            return replace(super().train(message, client), weight=1, votes=message.masks)
        moving = LayerReallocation(message.masks, self.exchange, client.key("FLASH moves"))
        result = client.fit(message.weights, callbacks=[*self.callbacks(message, client), moving])
        extra = {"densities": _densities(moving.masks)} if self.sensitivity == "masks" else {}
        return Update(weights=result.weights, votes=moving.masks, extra=extra, metrics=result.metrics)

    def may_vote(self, message: Message) -> Masks:
        """Return where an upload may vote: anywhere if masks move."""
        return {} if self.form == "JMWST" else super().may_vote(message)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Return the mean, of which each layer keeps its largest weights if masks have moved."""
        mean, moved = super().aggregate(server, merged), self.moves(server.round)
        if not moved and not self.needs_exact_mean:
            return mean
        pool = {name: self._mean(mean.weights[name], merged.voters.get(name), merged.clients) for name in server.masks}
        masks = server.masks
        if moved:
            if self.sensitivity == "masks":
                found = merged.extra["densities"]
            else:
                found = _densities({name: value != 0 for name, value in pool.items()})
            masks = prune_to(magnitude(pool), self._counts(pool, found))
        return replace(mean, weights=apply({**mean.weights, **pool}, masks), masks=masks)

    def _mean(self, mean: torch.Tensor, voters: torch.Tensor | None, clients: int) -> torch.Tensor:
        """Return the mean that is asked for, from that over the clients who keep a weight; 0 where nobody does."""
        if voters is None:
            return mean
        return mean * (voters.to(mean.dtype) / clients if self.merge == "mean" else voters > 0)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with one bit for each position of a mask that has moved, or is a part of the server's."""
        costs, round = super().costs(facts), facts.view.round
        bits = sum(mask.numel() for mask in facts.message.masks.values()) / 8
        part = self.hetero and facts.view.capacity < 1
        new = round > 0 and (part or self.moves(round - 1))
        return replace(
            costs,
            bytes_down_paper=costs.bytes_down_paper + bits * new,
            bytes_up_paper=costs.bytes_up_paper + bits * self.moves(round),
        )


def _densities(masks: Masks) -> Weights:
    """Return the density of each mask."""
    return {name: mask.double().mean() for name, mask in masks.items()}
