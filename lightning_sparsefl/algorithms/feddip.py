"""FedDIP: Federated Learning with Extreme Dynamic Pruning and Incremental Regularization.

Long, Anagnostopoulos, Puthiya Parambath, Bi, ICDM 2023, arXiv:2309.06805, Algorithm 1; equations are numbered as there.

The server has one mask. It starts as a random ERK mask, and is updated every R rounds from the magnitudes of the merged
dense weights, while the density falls by a cubic schedule (eq. 11). Clients train dense weights with the gradients of
the pruned ones (eq. 5, the error feedback of DPF, arXiv:2006.07253) and a penalty on the norms of layers that increases
in steps (eqs. 8, 9). ``penalty=0`` is FedDP in the paper; ``initial_density=1`` in addition is DPF; ``mu`` above 0 is
FedDIP+Prox.

Departures from the authors' code:

- The mask is computed from the merged dense weights before it is applied, as in Algorithm 1. The code applies the old
  mask first, so that pruned weights never return: ``recover=False``. The published results were made with the code.
- The mask is updated after rounds R, 2R, ..., as in Algorithm 1, so a run whose length is a multiple of R ends with a
  mask without training under it. The code updates it after rounds 1, R + 1, ..., and trains R - 1 rounds after the last
  update.
- The server draws the first mask, and keeps it until round R. In the code every client of round 0 draws its own, and
  the server replaces them directly after that round.
- The steps of the penalty are those of eq. 9, with 0 in the first of Q parts; the code has 20 parts and starts with
  5e-4 in the second.
- The proximal term is the squared distance to the received weights; that of the code is not squared, and compares the
  weights with themselves. As a part of the loss it is computed at the pruned weights, so it has no effect on pruned
  ones.
- Running statistics of batch norm are those of the pruned model; the code keeps those of the dense one.
- ``flops/paper`` has no counterpart in the paper. The paper's bytes follow the cubic schedule in every round, although
  the mask changes every R rounds, and include all parameters, although biases and norms are never pruned.

The masks of shortcut convolutions do not change, as in the paper's Table II; ``fixed_layers`` identifies them by name.
If R does not divide the number of rounds, the last update comes before the last round, and its density is slightly
above `density`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GroupPenalty, ProximalTerm
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.layers import exactly
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import apply, dense_like, kept
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.schedule import cubic, staircase
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import CostFacts, Costs, Masks, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedDIP(FederatedAlgorithm):
    """One global mask that is updated from dense uploads, with an increasing penalty."""

    fixed_length = True
    can_be_private = True

    density: float = 0.1
    """Fraction of the weights that the last mask keeps (d_p), in (0, 1]."""
    initial_density: float = 0.5
    """Fraction of the weights that the first mask keeps (d_0), from `density` to 1; 1 = dense."""
    reconfigure_every: int = 5
    """Number of rounds between two updates of the mask (R)."""
    penalty: float = 1e-3
    """Final strength of the penalty on the layers' norms (lambda_max), >= 0; 0 is FedDP."""
    stairs: int = 10
    """Number of equal parts of the run in which the penalty is constant (Q); it is 0 in the first."""
    mu: float = 0.0
    """Strength of the proximal term, >= 0; above 0 is FedDIP+Prox."""
    recover: bool = True
    """Whether pruned weights can return, as in the paper, or never do, as in the authors' code."""
    fixed_layers: tuple[str, ...] = ("*shortcut*", "*downsample*")
    """Patterns of names of layers whose masks do not change, and which have no penalty."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name, fits, expected in (
            ("density", 0 < self.density <= 1, "a number in (0, 1]"),
            ("initial_density", self.density <= self.initial_density <= 1, "a number from `density` to 1"),
            ("reconfigure_every", self.reconfigure_every >= 1, "a whole number >= 1"),
            ("penalty", self.penalty >= 0, "a number >= 0"),
            ("stairs", self.stairs >= 1, "a whole number >= 1"),
            ("mu", self.mu >= 0, "a number >= 0"),
        ):
            require(fits, f"algorithm.{name}", getattr(self, name), expected)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the first mask, and store the number of rounds of the run."""
        names = fleet.maskable(weights)
        if not any(map(self._moves, names)):
            raise InvalidOption(
                f"`algorithm.fixed_layers` is {self.fixed_layers}, which leaves no layer to prune; expected patterns "
                "that spare some tensor of two or more dimensions."
            )
        shapes = {name: weights[name].shape for name in names}
        counts = kept_counts(shapes, erk(shapes, self.initial_density))
        masks = fleet.random_masks(shapes, counts, "FedDIP mask")
        plan = {"rounds": torch.tensor(float(fleet.max_rounds), device=fleet.device)}
        return ServerState(round=0, weights=apply(weights, masks), masks=masks, extra={"plan": plan})

    def _moves(self, name: str) -> bool:
        """Return whether the mask of a layer is updated."""
        return not any(fnmatchcase(name, pattern) for pattern in self.fixed_layers)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the terms of the loss, which are computed at the pruned weights, and the error feedback."""
        layers = exactly(name for name in message.masks if self._moves(name))
        # tau counts from 1 in Algorithm 1
        strength = staircase(self.penalty, self.stairs, client.round + 1, client.max_rounds)
        terms: list[Callback] = [GroupPenalty(strength, stairs=None, layers=layers)] if strength else []
        if self.mu:
            terms.append(ProximalTerm(self.mu, anchor=message.weights))
        return [*terms, ErrorFeedback(masks=message.masks)]

    def train(self, message: Message, client: Client) -> Update:
        """Train dense weights with the gradients of the pruned ones, and send the dense weights."""
        callbacks = self.callbacks(message, client)
        result = client.fit(
            message.weights, callbacks=callbacks
        )  # without masks, which would keep pruned weights at zero
        pruned = next(callback.pruned for callback in callbacks if isinstance(callback, ErrorFeedback))
        dense = {name: value + pruned[name] if name in pruned else value for name, value in result.weights.items()}
        return Update(weights=dense, weight=client.num_examples, votes={}, metrics=result.metrics)

    def may_vote(self, message: Message) -> Masks:
        """Return no masks, since updates are dense."""
        return {}

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge the updates, update the mask if it is due, and prune the weights."""
        mean, masks, finished = super().aggregate(server, merged), server.masks, server.round + 1
        if finished % self.reconfigure_every == 0:
            share = self.density_after(finished, int(server.extra["plan"]["rounds"]))
            masks = self._reconfigured(mean.weights, masks, share)
        return replace(mean, weights=apply(mean.weights, masks), masks=masks)

    def density_after(self, rounds: int, max_rounds: int) -> float:
        """Return the density of the mask (eq. 11): that of its last update, or d_0 before the first one.

        Args:
            rounds: Number of finished rounds.
            max_rounds: Number of rounds of the run.
        """
        last = rounds - rounds % self.reconfigure_every
        return cubic(self.initial_density, self.density, last, max_rounds)

    def _reconfigured(self, weights: Weights, masks: Masks, share: float) -> Masks:
        """Return masks that keep the globally largest magnitudes, without `recover` only within the old masks."""
        old = {name: mask for name, mask in masks.items() if self._moves(name)}
        pool = dense_like(old) if self.recover else old
        count = max(1, round(share * sum(mask.numel() for mask in old.values())))
        moved = shrink_globally(magnitude({n: weights[n] for n in pool}), pool, min(count, kept(pool)))
        return {**masks, **moved}

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the pruned model, since only the server uses the pruned weights of the dense one."""
        return apply(update.weights, message.masks)

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with a mask of the density of the round, computed from the initial weights."""
        masks = server.masks
        if round >= self.reconfigure_every:
            share = self.density_after(round, int(server.extra["plan"]["rounds"]))
            masks = self._reconfigured(server.weights, masks, share)
        return replace(server, round=round, weights=apply(server.weights, masks), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with dense uploads, downloads by the cubic schedule, and dense gradients of the weights."""
        held, dense = (forward_flops(facts.layers, masks) for masks in (facts.message.masks, {}))
        up = BYTES_PER_WEIGHT * sum(w.numel() for n, w in facts.message.weights.items() if n not in facts.buffers)
        share = cubic(self.initial_density, self.density, facts.view.round, facts.view.max_rounds)
        return replace(
            super().costs(facts),
            flops_analytic=facts.epochs * facts.samples * (2 * held + dense),
            bytes_down_paper=share * up,
            bytes_up_paper=up,
        )
