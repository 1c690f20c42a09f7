"""LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Ticket Hypothesis.

Li, Sun, Wang, Duan, Li, Chen, Li; on non-IID data sets; arXiv:2008.03371 (SEC 2021), Algorithm 1.

Each client searches a lottery ticket of its own. When the received model, under the client's mask, is accurate enough
on its data, the client drops a fraction of the smallest kept weights, sets the others back to the run's initial values
and trains them; otherwise it trains the received model. The server averages each weight over the clients that keep it.

The authors train 60 local epochs per round (`trainer.max_epochs`); since a pruning starts from initial values, few
epochs give poor models in those rounds.

Departures from the authors' code:

- The fraction of a pruning is .1, the default of the code; its published runs and the paper have .2.
- The score that gates a pruning is computed on all of the client's validation data, or on its training data
  (``gate="train"``); the code uses at most two batches of test data.
- Dropped weights are those of the mask; in the code all weights below 1e-6, so that weights that start at 0 stay so.
- Only tensors of two or more dimensions are pruned, and of equal magnitudes the higher index is dropped.
- Buffers are not set back.
- A client is scored with the merged model under its mask; the code reports the best accuracy that it has ever had.

The row of FedLPS's table (arXiv:2412.07216, Table I) prunes the received weights without setting them back
(``rewind=False``) and takes the mean over the cohort (``merge="mean"``).

Costs are those of the mask that a client begins a round with, also in a round in which it prunes, of which the code
counts the bytes of the mask afterwards. The forward passes of the gate over validation data are not in the FLOPs, since
their number is not known; those over training data are in ``flops/train``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_sparsefl.algorithms import _personal_masks as personal
from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.masks import density as share_of
from lightning_sparsefl.sparse.prune import below_percentile, prune_percentile
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class LotteryFL(FederatedAlgorithm):
    """A lottery ticket for each client: pruned by magnitude and trained from the initial weights."""

    uploads_shared = True

    density: float = 0.5
    """Density of a client's mask, by its number of prunings, at which the client stops pruning, in (0, 1]."""
    step: float = 0.1
    """Fraction of a layer's kept weights that one pruning drops, in [0, 1)."""
    min_score: float = 0.2
    """Score of the received model that a pruning must exceed."""
    gate: Literal["val", "train"] = "val"
    """Split of the client's data that the score is computed on."""
    metric: str = "val_acc"
    """Name of the score, which the module's `validation_step` logs."""
    rewind: bool = True
    """Whether a pruning sets the kept parameters back to the run's initial values."""
    merge: Literal["count", "mean"] = "count"
    """Mean of each coordinate over the clients whose masks keep it (the paper), or over the cohort."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(0 <= self.step < 1, "algorithm.step", self.step, "a number in [0, 1)")
        personal.require_gate(self.min_score, self.metric)

    @property
    def without_validation(self) -> str | None:
        """Scores of the gate on training data."""
        return "set `algorithm.gate: train`" if self.gate == "val" else None

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Start with dense masks."""
        return personal.start(weights, fleet, fleet.trained(weights))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send m_k * w, and the mask if the client does not have it."""
        masks = personal.masks_of(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def train(self, message: Message, client: Client) -> Update:
        """Prune the mask and rewind if the gate is open, then train."""
        layers = {name: message.masks[name] for name in maskable(message.masks)}
        density = float(client.memory.get("density", share_of(layers)))
        open_ = self.step > 0 and density > self.density
        if open_ and personal.score(client, message.weights, self.gate, self.metric) > self.min_score:
            density *= 1 - self.step
            masks = self._pruned(message)
            result = client.fit(self._start(message, masks), masks, callbacks=self.callbacks(message, client))
        else:
            masks = message.masks
            result = client.fit(message.weights, masks, callbacks=self.callbacks(message, client))
        difference = self.merge == "mean"
        return Update(
            weights=subtract(result.weights, message.weights) if difference else result.weights,
            kind="difference" if difference else "weights",
            votes=masks,
            shared=None if masks is message.masks else {"masks": masks},
            memory={"density": density},
            metrics=result.metrics,
        )

    def _pruned(self, message: Message) -> Masks:
        """Return the masks without the smallest weights of each layer."""
        layers = {name: message.masks[name] for name in maskable(message.masks)}
        return {**message.masks, **prune_percentile(magnitude(message.weights), layers, self.step)}

    def _start(self, message: Message, masks: Masks) -> Weights:
        """Return the weights that a pruned model starts from; names that are missing take their initial values."""
        if self.rewind:  # only parameters have masks
            return {name: value for name, value in message.weights.items() if name not in masks}
        return apply(message.weights, masks)

    def reducer(self) -> Reducer:
        """Return the mean over the clients whose masks keep a coordinate, or over the cohort."""
        return CoverageMean() if self.merge == "count" else PlainMean()

    def prunings(self) -> int:
        """Return how often a client prunes at most."""
        count, density = 0, 1.0
        while self.step > 0 and density > self.density:
            count, density = count + 1, density * (1 - self.step)
        return count

    def _may_prune(self, masks: Masks) -> bool:
        """Return whether a client with these masks has not pruned as often as it may."""
        left, density = share_of({name: masks[name] for name in maskable(masks)}), 1.0
        while self.step > 0 and density * (1 - self.step / 2) > left:  # the number of prunings that is nearest
            density *= 1 - self.step
        return self.step > 0 and density > self.density

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with the mask of a client whose gate was always open."""
        layers = set(maskable(server.extra["first_masks"]))

        def prune(left: personal.Counts) -> personal.Counts:
            return {n: c - (below_percentile(self.step, c) if n in layers else 0) for n, c in left.items()}

        return personal.expected(server, round, prune, self.prunings())

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the client's sparse model, and of a gate on training data."""
        costs = super().costs(facts)
        scored = self.gate == "train" and self._may_prune(facts.message.masks)
        gate = facts.samples * forward_flops(facts.layers, facts.message.masks) if scored else 0
        return replace(costs, flops_analytic=costs.flops_analytic + gate)
