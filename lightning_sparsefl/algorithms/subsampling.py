"""Subsampling: FedAvg whose clients send a random part of their changes.

Konecny, McMahan, Yu, Richtarik, Suresh, Bacon, 2016, arXiv:1610.05492, section 3 (sketched updates: subsampling); a row
of Tables 1 and 2 of FedSpa, arXiv:2201.11380.

Each client trains as in FedAvg, and sends a random part of the coordinates of its change, drawn anew in each round. The
others count as no change. The server sends the seed of the draw (8 bytes), so that no mask travels.

Departures from the paper:

- A fixed number of coordinates of each tensor is drawn, at least one, instead of each coordinate by itself.
- The division by the fraction, which makes the mean unbiased, is of each tensor's exact share. FedSpa describes its row
  without it, and its runs take twice as many rounds as FedAvg: ``scale=False``.
- Only sampling is offered, without the paper's quantization and rotations. Buffers are sent in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import BYTES_PER_WEIGHT
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import derive_seed, generator
from lightning_sparsefl.sparse.masks import subtract
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class Subsampling(FederatedAlgorithm):
    """FedAvg in which a client sends a random part of the coordinates of its change."""

    fraction: float = 0.5
    """Fraction of each tensor's coordinates that a client sends (q), in (0, 1]."""
    scale: bool = True
    """Whether what is sent is divided by the fraction, so that its expectation is the whole change."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.fraction <= 1, "algorithm.fraction", self.fraction, "a number in (0, 1]")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights, and the names of buffers."""
        named = {name: torch.zeros(0, device=fleet.device) for name in sorted(fleet.buffers)}
        return ServerState(round=0, weights=weights, extra={"buffers": named})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the weights, the seed of the client's draw, and the names of buffers."""
        extra: dict[str, Weights] = {"sample": {"seed": torch.tensor(self._seed(view))}}
        named = server.extra["buffers"]
        return Message(weights=server.weights, extra={**extra, "buffers": named} if named else extra)

    @staticmethod
    def _seed(view: ClientView) -> int:
        return derive_seed(view.seed, view.round, view.id, "subsampling")

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the weights alone."""
        return Message(weights=server.weights)

    def may_vote(self, message: Message) -> Masks:
        """Return the coordinates that the client sends, which follow from the seed."""
        counts = self._counts(message)
        rng = generator(int(message.extra["sample"]["seed"]), "coordinates")
        drawn = random_masks({name: message.weights[name].shape for name in counts}, counts, rng)
        return {name: mask.to(message.weights[name].device) for name, mask in drawn.items()}

    def _counts(self, message: Message) -> dict[str, int]:
        """Return the number of coordinates of each parameter that the client sends."""
        sizes = {n: w.numel() for n, w in message.weights.items() if n not in message.extra.get("buffers", {})}
        # sorted, since the draws of both ends must have one order
        return {name: max(1, round(self.fraction * sizes[name])) for name in sorted(sizes) if sizes[name]}

    def train(self, message: Message, client: Client) -> Update:
        """Train, and send the change where the client may vote."""
        result = client.fit(message.weights, callbacks=self.callbacks(message, client))
        moved, factors = subtract(result.weights, message.weights), self._factors(message)
        return Update(
            weights={name: value / factors.get(name, 1.0) for name, value in moved.items()},
            kind="difference",
            weight=client.num_examples,
            metrics=result.metrics,
        )

    def _factors(self, message: Message) -> dict[str, float]:
        """Return what the change of each parameter is divided by."""
        if not self.scale:
            return {}
        return {name: count / message.weights[name].numel() for name, count in self._counts(message).items()}

    def trained(self, message: Message, update: Update) -> Weights:
        """Return what local training ended with."""
        factors = self._factors(message)
        whole = {name: value * factors.get(name, 1.0) for name, value in update.weights.items()}
        return super().trained(message, replace(update, weights=whole))

    def reducer(self) -> Reducer:
        """Return the mean over the cohort, in which what is not sent counts as no change."""
        return PlainMean()

    def costs(self, facts: CostFacts) -> Costs:
        """Return FedAvg's costs with the part of the upload that is sent."""
        kept = sum(count for name, count in self._counts(facts.message).items() if name not in facts.buffers)
        return replace(super().costs(facts), bytes_up_paper=BYTES_PER_WEIGHT * kept)
