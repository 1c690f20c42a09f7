"""PruneFL: Model Pruning Enables Efficient Federated Learning on Edge Devices.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, IEEE TNNLS 2022, arXiv:1909.12326.

One client prunes the initial model on its own data. From then on clients train under the server's mask and add up the
squared sums of their dense gradients. Every R rounds they send these sums, and the server keeps the weights that reduce
the loss most for the time that they take.

Departures from the paper and the authors' code:

- The sum of a fit's gradients is squared after the sum, as in the paper. The code keeps references to gradients that
  PyTorch overwrites, so that its sum is a multiple of the last gradient in old versions of PyTorch.
- The merge weights squared sums by samples once, and they count since the client's last upload. A client that does not
  participate in a reconfiguration keeps them.
- A weight that returns starts at 0; in the code, at the value that it had when it was pruned.
- The first client trains epochs over all of its data, and may bring weights back; in the code it repeats 200 samples,
  and masks only shrink. `profile` trains nothing, and assumes a dense first mask, by the cubic one of
  `initial_density`. The FLOPs of the first client's training and of SNIP's gradients are not charged.
- Times follow from FLOPs and bytes per weight; the paper measures them. `seconds_per_weight` sets measured ones.
- ``criterion="cubic"`` is the row of FedDIP (arXiv:2309.06805): the density follows a cubic, and the largest squared
  gradients stay. Its first client prunes to `initial_density` after every `first_epochs` epochs, until
  `first_accuracy`, and not by time. That code sums no gradients but takes the last one of each client, keeps one weight
  more and further ones depending on measured seconds; its first client, a hundredth of the data, prunes after 5 epochs
  and after 25 more.
- ``criterion="halving"`` is the row of FedLPS (arXiv:2412.07216): the share that may be pruned is `prunable`, halved
  every `half_life` rounds. That code averages last gradients, uniformly, and times of layers are their sizes; its first
  client is drawn at random, starts with a random mask of density .5 and prunes at most ten times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.algorithms._first_client import prune_alone, prune_until_accurate, worthwhile
from lightning_sparsefl.algorithms._first_mask import require_scores
from lightning_sparsefl.callbacks import GradientSum
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import erk, floor_count, kept_counts, listed
from lightning_sparsefl.sparse.masks import apply, dense_like, kept
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.schedule import cubic
from lightning_sparsefl.sparse.scores import magnitude, snip
from lightning_sparsefl.types import CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class PruneFL(FederatedAlgorithm):
    """One global mask of the weights that are worth their time, by the clients' squared gradients."""

    criterion: Literal["time", "cubic", "halving"] = "time"
    """Rule of a reconfiguration: gain for time, or the largest squared gradients at a density by schedule."""
    density: float = 0.1
    """Density at the end of the cubic schedule, in (0, 1]."""
    initial_density: float = 0.5
    """Density at the start of the cubic schedule, with that of the first client's mask, and of a first mask by ERK or
    SNIP, in (0, 1]."""
    reconfigure_every: int = 50
    """Number of rounds between two reconfigurations (R)."""
    prunable: float = 0.3
    """Largest fraction of the weights that a reconfiguration may drop, in [0, 1]."""
    half_life: float = 10_000.0
    """Number of rounds after which `prunable` has halved."""
    first: Literal["client", "erk", "snip", "dense"] = "client"
    """First mask: pruned by one client, drawn by ERK, from all clients' gradients by SNIP, or dense."""
    first_epochs: int = 50
    """Number of epochs between two reconfigurations of the first client, of which there are at most 20."""
    first_accuracy: float = 0.15
    """Value of `federation.monitor` from which on the first client prunes, by the cubic schedule at which it ends: 1.5
    times chance level, here with 10 classes; 0 = at once."""
    seconds_per_weight: Mapping[str, float] | None = None
    """Seconds that a round takes longer for each weight, by patterns of layers' names; null = from FLOPs and bytes."""
    constant: float = 0.0
    """Seconds of a round that do not depend on the mask."""
    flops_per_second: float = 1e9
    """Operations per second of a client."""
    bytes_per_second: float = 1e6
    """Bandwidth of a client, in both directions."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("density", "initial_density"):
            require(0 < getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in (0, 1]")
        for name in ("reconfigure_every", "first_epochs"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "a whole number >= 1")
        for name in ("half_life", "flops_per_second", "bytes_per_second"):
            require(getattr(self, name) > 0, f"algorithm.{name}", getattr(self, name), "a number above 0")
        require(0 <= self.prunable <= 1, "algorithm.prunable", self.prunable, "a number in [0, 1]")
        require(not math.isnan(self.first_accuracy), "algorithm.first_accuracy", self.first_accuracy, "a number")
        require(self.constant >= 0, "algorithm.constant", self.constant, "a number >= 0")
        times = self.seconds_per_weight or {}
        fits = all(isinstance(value, (int, float)) and value > 0 for value in times.values())
        require(fits, "algorithm.seconds_per_weight", times, "numbers above 0 by pattern")

    @property
    def fixed_length(self) -> bool:  # type: ignore[override]
        """Whether the density follows a schedule over the rounds of the run."""
        return self.criterion == "cubic"

    @property
    def needs_metrics(self) -> bool:  # type: ignore[override]
        """Whether the first client waits for an accuracy."""
        return self.first == "client" and self.first_accuracy > 0

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Make the first mask, and estimate the time of a weight of each layer."""
        pool = fleet.prunable(weights, self.dense_layers)
        seconds = {n: torch.tensor(time, device=fleet.device) for n, time in self._seconds(pool, fleet).items()}
        plan = {"rounds": torch.tensor(float(fleet.max_rounds), device=fleet.device)}
        state = ServerState(round=0, weights=weights, extra={"plan": plan, "seconds": seconds})
        masks: Masks = dense_like(pool)
        if self.first == "erk":
            kept_of = kept_counts(pool, erk(pool, self.initial_density))
            masks = fleet.random_masks(pool, kept_of, "PruneFL mask")
        elif self.first == "snip":
            slopes = fleet.survey(Message(weights={})).weights
            count = max(len(pool), floor_count(self.initial_density, kept(masks)))
            scores = snip(pool, slopes)
            require_scores(scores)
            masks = shrink_globally(scores, masks, count, least=1)
        elif self.first == "client":
            best = max(fleet.views, key=lambda view: (view.capacity, view.num_examples, -view.id))
            asked = {"client": torch.tensor(float(best.id))}
            answer = fleet.survey(Message(weights={}, extra={"asked": asked, "seconds": seconds}))
            state = super().aggregate(state, answer)
            masks = {n: share > 0 for n, share in answer.extra.get("masks", {}).items()} or masks
        return replace(state, weights=apply(state.weights, masks), masks=masks)

    def _seconds(self, pool: Weights, fleet: Fleet) -> dict[str, float]:
        """Return the time of a weight in a round: three passes over the mean client's samples, and both ways."""
        given = self.seconds_per_weight or {}
        for pattern in given:
            if not any(fnmatchcase(name, pattern) for name in pool):
                raise InvalidOption(
                    f"`algorithm.seconds_per_weight`: the pattern {pattern!r} matches no layer, expected one for "
                    f"{listed(pool)}."
                )
        samples = sum(map(fleet.samples, fleet.views)) / len(fleet)
        macs = {layer.weight: layer.macs for layer in fleet.layers}
        times = {}
        for name, weight in pool.items():
            work = 6 * macs.get(name, weight.numel()) / weight.numel() * samples
            times[name] = work / self.flops_per_second + 2 * BYTES_PER_WEIGHT / self.bytes_per_second
            for pattern, value in given.items():
                times[name] = value if fnmatchcase(name, pattern) else times[name]
        return times

    def survey(self, message: Message, client: Client) -> Update:
        """Return the gradient at the initial weights; or, of the client that is asked, a pruned model."""
        if self.first == "snip":
            return Update(weights=client.gradient({}), weight=client.num_examples)
        if int(message.extra["asked"]["client"]) != client.id:
            return Update(weights={})
        weights, masks = self._prune_alone(message.extra["seconds"], client)
        return Update(weights=weights, weight=client.num_examples, extra={"masks": masks} if masks else {})

    def _prune_alone(self, seconds: Weights, client: Client) -> tuple[Weights, Masks]:
        """Return the weights and masks of the first client."""
        epochs, accuracy = self.first_epochs, self.first_accuracy
        if self.criterion == "cubic":
            return prune_until_accurate(
                client, lambda squares: self._largest(squares, list(seconds), self.initial_density), epochs, accuracy
            )
        return prune_alone(client, seconds, epochs, accuracy, self.prunable, self.constant)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the sum of the dense gradients."""
        return [GradientSum()]

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, and add up squared sums of gradients, which are sent in rounds R, 2R, ..."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, message.masks, callbacks=callbacks)
        gradients = next(callback for callback in callbacks if isinstance(callback, GradientSum))
        before = client.memory.get("squares", {})
        squares = {name: before.get(name, 0) + total.square() for name, total in gradients.sums.items()}
        due = (client.round + 1) % self.reconfigure_every == 0
        return Update(
            weights=result.weights,
            weight=client.num_examples,
            extra={"squares": squares} if due else {},
            memory={} if due else {"squares": squares},
            metrics=result.metrics,
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge the updates, and reconfigure the mask if squared gradients came with them."""
        mean, masks = super().aggregate(server, merged), server.masks
        if "squares" in merged.extra:
            squares = merged.extra["squares"]
            if self.criterion == "time":
                seconds, fraction = server.extra["seconds"], self._fraction(server.round)
                masks = worthwhile(mean.weights, masks, squares, seconds, fraction, self.constant)
            else:
                share = self.share(server.round, int(server.extra["plan"]["rounds"]))
                masks = self._largest(squares, list(masks), share)
        return replace(mean, weights=apply(mean.weights, masks), masks=masks)

    def _fraction(self, round: int) -> float:
        """Return the largest fraction of the weights that the reconfiguration of a round may drop."""
        return self.prunable * float(0.5 ** (round / self.half_life))

    def share(self, round: int, max_rounds: int) -> float:
        """Return the density after a reconfiguration by schedule.

        Args:
            round: Number of the round, from 0.
            max_rounds: Number of rounds of the run.
        """
        if self.criterion == "halving":
            return 1 - self._fraction(round)
        return cubic(self.initial_density, self.density, round, max_rounds)

    @staticmethod
    def _largest(values: Weights, names: Sequence[str], share: float) -> Masks:
        """Return masks of the largest values of all tensors together."""
        pool = {name: values[name] for name in names}
        dense = dense_like(pool)
        return shrink_globally(pool, dense, max(len(pool), floor_count(share, kept(dense))), least=1)

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with a mask of the density of the schedule, computed from the initial weights."""
        last, masks = round - round % self.reconfigure_every - 1, server.masks
        starts = self.criterion == "cubic" and self.first == "client"  # with a mask of the schedule's first density
        if starts or (self.criterion != "time" and last >= 0):
            share = self.share(max(last, 0), int(server.extra["plan"]["rounds"]))
            masks = self._largest(magnitude(server.weights), list(masks), share)
        return replace(server, round=round, weights=apply(server.weights, masks), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with dense gradients of the weights, and squared gradients and new masks every R rounds."""
        costs, finished = super().costs(facts), facts.view.round + 1
        held, dense = (forward_flops(facts.layers, masks) for masks in (facts.message.masks, {}))
        every = BYTES_PER_WEIGHT * sum(w.numel() for n, w in facts.message.weights.items() if n not in facts.buffers)
        bits = sum(mask.numel() for mask in facts.message.masks.values()) / 8
        changed = facts.view.round > 0 and facts.view.round % self.reconfigure_every == 0
        return replace(
            costs,
            flops_analytic=facts.epochs * facts.samples * (2 * held + dense),
            bytes_down_paper=costs.bytes_down_paper + changed * bits,
            bytes_up_paper=costs.bytes_up_paper + (finished % self.reconfigure_every == 0) * every,
        )
