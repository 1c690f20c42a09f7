"""FedDIP: Federated Learning with Extreme Dynamic Pruning and Incremental Regularization.

Long, Anagnostopoulos, Puthiya Parambath, Bi, ICDM 2023, arXiv:2309.06805, Algorithm 1; equations are numbered as there.

One mask, the server's, starts as ERK and is taken anew every R rounds from the magnitudes of the merged dense weights,
while the density falls by a cubic (eq. 11). Clients train dense weights by the gradients of the pruned ones (eq. 5,
the error feedback of DPF, arXiv:2006.07253) under a penalty on the norms of layers that climbs by stairs (eqs. 8, 9).
``penalty=0`` is the paper's FedDP, with ``initial_density=1`` too it is DPF, ``mu`` above 0 is FedDIP+Prox.

Departures from the authors' code:

- The mask is taken from the merged dense weights and only then applied, as in Algorithm 1. The code applies the old
  mask first, so that what was pruned never returns: ``recover=False``. The published results were made that way.
- The mask is taken anew after rounds R, 2R, ..., as in Algorithm 1, so a run whose length R divides ends with a mask
  under which nothing has been trained. The code takes it after rounds 1, R + 1, ..., and trains R - 1 rounds after the
  last one.
- The server draws the first mask, and keeps it until round R. In the code every client of round 0 draws its own, and
  the server replaces them right after that round.
- The stairs are those of eq. 9, 0 in the first of Q parts; the code has 20 parts and jumps to 5e-4 in the second.
- The proximal term is squared and taken against what was received; the code's is not squared, and compares the weights
  with themselves. Like the rest of the loss it is taken at the pruned weights, so it does not pull at pruned ones.
- Running statistics of batch norm are those of the pruned model; the code keeps those of the dense one.
- ``flops/paper`` has no counterpart in the paper. The paper's bytes follow the cubic in every round, although the mask
  moves every R rounds, and cover all parameters, although biases and norms are never pruned.

The mask of shortcut convolutions stays as it was drawn, as in the paper's Table II. Nothing in a weight tells that it
is a shortcut's, so names decide: ``fixed_layers``. Where R does not divide the number of rounds, the last mask comes
before the last round and keeps a little more than `density`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GroupPenalty, ProximalTerm
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import BYTES_PER_WEIGHT, FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts, maskable
from lightning_sparsefl.sparse.masks import apply, dense_like, kept
from lightning_sparsefl.sparse.prune import random_masks, shrink_globally
from lightning_sparsefl.sparse.schedule import cubic, staircase
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedDIP(FederatedAlgorithm):
    """One global mask, taken anew from dense uploads, and a penalty that climbs."""

    fixed_length = True
    can_be_private = True

    density: float = 0.1
    """Fraction of the weights that the last mask keeps (d_p), in (0, 1]."""
    initial_density: float = 0.5
    """Fraction that the first mask, drawn by ERK, keeps (d_0), from `density` to 1; 1 starts dense."""
    reconfigure_every: int = 5
    """Rounds between two masks (R)."""
    penalty: float = 1e-3
    """Strength that the penalty on the layers' norms climbs to (lambda_max), >= 0; 0 is FedDP."""
    stairs: int = 10
    """Equal parts of the run in which the penalty is constant (Q); there is none in the first."""
    mu: float = 0.0
    """Strength of the pull towards what was received, >= 0; above 0 is FedDIP+Prox."""
    recover: bool = True
    """Whether pruned weights can return, as in the paper, or never do, as in the authors' code."""
    fixed_layers: tuple[str, ...] = ("*shortcut*", "*downsample*")
    """Layers that keep the mask they were drawn, and have no penalty: patterns of names."""

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("density", 0 < self.density <= 1, "a number in (0, 1]"),
            ("initial_density", self.density <= self.initial_density <= 1, "a number from `density` to 1"),
            ("reconfigure_every", self.reconfigure_every >= 1, "a whole number >= 1"),
            ("penalty", self.penalty >= 0, "a number >= 0"),
            ("stairs", self.stairs >= 1, "a whole number >= 1"),
            ("mu", self.mu >= 0, "a number >= 0"),
        ):
            if not fits:
                raise InvalidOption(f"`FedDIP({name}={getattr(self, name)})`: expected {expected}.")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the first mask, and note how long the run is."""
        names = maskable({name: value for name, value in weights.items() if name not in fleet.buffers})
        if not any(map(self._moves, names)):
            raise InvalidOption(
                f"`FedDIP(fixed_layers={self.fixed_layers})` leaves no layer to prune; expected patterns that spare "
                "some tensor of two or more dimensions."
            )
        shapes = {name: weights[name].shape for name in names}
        counts = kept_counts(shapes, erk(shapes, self.initial_density))
        drawn = random_masks(shapes, counts, generator(fleet.seed, "FedDIP mask"))
        masks = {name: mask.to(fleet.device) for name, mask in drawn.items()}
        plan = {"rounds": torch.tensor(float(fleet.max_rounds), device=fleet.device)}
        return ServerState(round=0, weights=apply(weights, masks), masks=masks, extra={"plan": plan})

    def _moves(self, name: str) -> bool:
        """Whether a layer's mask is ever taken anew."""
        return not any(fnmatchcase(name, pattern) for pattern in self.fixed_layers)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """The loss's terms, which see the pruned weights, then the error feedback."""
        layers = [name for name in message.masks if self._moves(name)]
        # tau counts from 1 in Algorithm 1
        strength = staircase(self.penalty, self.stairs, client.round + 1, client.max_rounds)
        terms: list[Callback] = [GroupPenalty(strength, stairs=None, layers=layers)] if strength else []
        if self.mu:
            terms.append(ProximalTerm(self.mu, anchor=message.weights))
        return [*terms, ErrorFeedback(masks=message.masks)]

    def train(self, message: Message, client: Client) -> Update:
        """Train by the gradients of the pruned model, and send the dense one."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)  # without masks: they would be held
        pruned = next(callback.pruned for callback in callbacks if isinstance(callback, ErrorFeedback))
        dense = {name: value + pruned[name] if name in pruned else value for name, value in result.weights.items()}
        return Update(weights=dense, weight=client.num_examples, votes={}, metrics=result.metrics)

    def may_vote(self, message: Message) -> Masks:
        """Everywhere, since what comes back is dense."""
        return {}

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge, take the mask anew if it is time, and prune."""
        mean, masks, finished = super().aggregate(server, merged), server.masks, server.round + 1
        if finished % self.reconfigure_every == 0:
            share = self.density_after(finished, int(server.extra["plan"]["rounds"]))
            masks = self._reconfigured(mean.weights, masks, share)
        return replace(mean, weights=apply(mean.weights, masks), masks=masks)

    def density_after(self, rounds: int, max_rounds: int) -> float:
        """Eq. 11 in densities, at the last round that took a mask; d_0 before there was one.

        Args:
            rounds: Finished so far.
            max_rounds: Of the run.
        """
        last = rounds - rounds % self.reconfigure_every
        return cubic(self.initial_density, self.density, last, max_rounds)

    def _reconfigured(self, weights: Weights, masks: Masks, share: float) -> Masks:
        """Of the layers that move, the largest magnitudes of all together; of the old mask alone without `recover`."""
        old = {name: mask for name, mask in masks.items() if self._moves(name)}
        pool = dense_like(old) if self.recover else old
        count = max(1, round(share * sum(mask.numel() for mask in old.values())))
        moved = shrink_globally(magnitude({n: weights[n] for n in pool}), pool, min(count, kept(pool)))
        return {**masks, **moved}

    def trained(self, message: Message, update: Update) -> Weights:
        """The pruned model; the rest of the dense one is for the server alone."""
        return apply(update.weights, message.masks)

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Masks of the densities that the round's will have, taken from the first weights."""
        masks = server.masks
        if round >= self.reconfigure_every:
            share = self.density_after(round, int(server.extra["plan"]["rounds"]))
            masks = self._reconfigured(server.weights, masks, share)
        return replace(server, round=round, weights=apply(server.weights, masks), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """All parameters up, the share of the cubic down; weight gradients are dense, the other two passes pruned."""
        held, dense = (forward_flops(facts.layers, masks) for masks in (facts.message.masks, {}))
        up = BYTES_PER_WEIGHT * sum(w.numel() for n, w in facts.message.weights.items() if n not in facts.buffers)
        share = cubic(self.initial_density, self.density, facts.view.round, facts.view.max_rounds)
        return replace(
            super().costs(facts),
            flops_analytic=facts.epochs * facts.samples * (2 * held + dense),
            bytes_down_paper=share * up,
            bytes_up_paper=up,
        )
