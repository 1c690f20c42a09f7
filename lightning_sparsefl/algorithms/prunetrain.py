"""PruneTrain: Fast Neural Network Training by Dynamic Sparse Model Reconfiguration, in a federation.

Lym, Choukse, Zangeneh, Wen, Sanghavi, Erez; SC 2019, arXiv:1901.09290; a baseline in Table III of FedDIP,
arXiv:2309.06805.

Clients train with a group lasso: a penalty on the norms of all output and input channels, which drives whole units
(channels, neurons, hidden states) to zero. The server averages the models by samples and removes units whose weights
are all below a threshold, for good; with `federation.execution: cut` clients then train a smaller model. The strength
of the penalty is set once, such that the penalty is a given fraction of loss and penalty together.

``groups="layers"`` is the baseline as FedDIP's authors programmed it: the penalty is on the norms of whole layers, and
clients and server prune the globally smallest weights to a density that falls by a cubic schedule. The first and the
last layer have no penalty and are not pruned. The received zeros train, and the mean is over all clients, zeros
included.

Departures from the paper, which is not federated:

- The loss that determines the strength is the mean over the first cohort, each on its first batch of round 0, in which
  there is no penalty; the norms are those of the first weights. The paper measures both in its first iteration.
- Biases and the parameters of norms neither are penalised nor keep a unit alive.
- The units of residual streams are removed as a whole, only if all layers that add to them agree. The paper's channel
  union does the same; its removal of whole layers and its larger batches are not included.
- Momentum is not kept across rounds.
- FedDIP's authors search the strength on a grid from 1e-1 to 1e-5. Their `groups="layers"` has no FLOPs in the paper;
  here its training is charged as dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.callbacks.first_loss import FirstLoss
from lightning_sparsefl.callbacks.layers import exactly
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops, narrow_facts
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.sparse.masks import apply, dense_like, intersect
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.schedule import cubic
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.sparse.unit_lasso import present_groups, unit_lasso
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import live_units, used_units
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Merged,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class PruneTrain(FederatedAlgorithm):
    """A group lasso in local training, and the removal of units that it has driven to zero."""

    strength: float | None = None
    """Factor of the penalty, >= 0; null = determined from `ratio` after the first round, which has no penalty."""
    ratio: float = 0.2
    """Fraction of the penalty in the sum of loss and penalty of the first weights, in [0, 1)."""
    groups: Literal["units", "layers"] = "units"
    """Groups of the penalty: units, removed by `threshold`; or layers, pruned by a schedule (FedDIP's row)."""
    threshold: float = 1e-4
    """Magnitude below which all weights of a unit must be for it to be removed, >= 0."""
    reconfigure_every: int = 1
    """Number of rounds between two removals."""
    density: float = 0.1
    """Final fraction of the pruned layers' weights, in (0, 1], with ``groups="layers"``."""
    initial_density: float = 0.5
    """Fraction that the first pruning keeps, from `density` to 1, with ``groups="layers"``."""
    fixed_layers: tuple[str, ...] = ("*shortcut*", "*downsample*")
    """Patterns of names of further layers without penalty and pruning, with ``groups="layers"``."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name, value, fits, expected in (
            ("strength", self.strength, self.strength is None or self.strength >= 0, "a number >= 0, or null"),
            ("ratio", self.ratio, 0 <= self.ratio < 1, "a number in [0, 1)"),
            ("threshold", self.threshold, self.threshold >= 0, "a number >= 0"),
            ("reconfigure_every", self.reconfigure_every, self.reconfigure_every >= 1, "a whole number >= 1"),
            ("density", self.density, 0 < self.density <= 1, "a number in (0, 1]"),
            (
                "initial_density",
                self.initial_density,
                self.density <= self.initial_density <= 1,
                "a number from `density` to 1",
            ),
        ):
            require(fits, f"algorithm.{name}", value, expected)

    @property
    def fixed_length(self) -> bool:  # type: ignore[override]
        """Whether the density follows a schedule over the rounds of the run."""
        return self.groups == "layers"

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the units, or the dense masks of the layers that are pruned."""
        plan = {"rounds": torch.tensor(float(fleet.max_rounds), device=fleet.device)}
        if self.groups == "units":
            if not fleet.units:
                raise InvalidOption(
                    "`PruneTrain` finds no units in the model; expected hidden channels, neurons or hidden states, or "
                    "`algorithm.groups: layers`."
                )
            return ServerState(round=0, weights=weights, extra={"plan": plan, "units": unit_tables(fleet.units)})
        names = maskable(fleet.trained(weights))[1:-1]
        pruned = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.fixed_layers)]
        if not pruned:
            raise InvalidOption(
                f"`algorithm.fixed_layers` is {self.fixed_layers}, which leaves no layer between the first and the "
                "last to prune; expected patterns that spare some, or a deeper model."
            )
        masks = dense_like({name: weights[name] for name in pruned})
        return ServerState(round=0, weights=weights, masks=masks, extra={"plan": plan})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the pruned weights, and the strength of the penalty if clients do not know it."""
        message = super().download(server, view)
        return replace(message, extra={"penalty": server.extra["penalty"]}) if "penalty" in server.extra else message

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the penalty."""
        strength = float(message.extra["penalty"]["strength"]) if "penalty" in message.extra else self.strength or 0.0
        if not strength:
            return []
        if self.groups == "layers":
            return [GroupPenalty(strength, stairs=None, layers=exactly(message.masks))]
        kept = used_units(client.units, message.weights)
        units = partial(present_groups, client.units, kept, message.weights)
        return [GroupPenalty(strength, stairs=None, groups="units", units=units)]

    def train(self, message: Message, client: Client) -> Update:
        """Train with the penalty, the live units only, or dense weights that are pruned afterwards."""
        first = FirstLoss()
        callbacks = [*self.callbacks(message, client), first]
        if self.groups == "units":
            kept = used_units(client.units, message.weights)
            whole = all(bool(units.all()) for units in kept.values())
            result = client.fit(message.weights, callbacks=callbacks, units=None if whole else kept)
            weights = result.weights
        else:
            result = client.fit(message.weights, callbacks=callbacks)
            masks = self._smallest_dropped(result.weights, message.masks, client.round, client.max_rounds)
            weights = apply(result.weights, masks)
        measured = {} if first.loss is None else {"first_loss": first.loss}
        metrics = {**result.metrics, **measured}
        return Update(weights=weights, weight=client.num_examples, metrics=metrics)

    def may_vote(self, message: Message) -> Masks:
        """Return the masks of the live units; with ``groups="layers"`` no masks, since received zeros train."""
        return intersect(message.trainable, message.masks) if self.groups == "units" else {}

    def _kept(self, size: int, round: int, max_rounds: int) -> int:
        """Return how many of `size` weights are left after a round."""
        return size - int((1 - cubic(self.initial_density, self.density, round, max_rounds)) * size + 0.5)

    def _smallest_dropped(self, weights: Weights, layers: Masks, round: int, max_rounds: int) -> Masks:
        """Return masks that keep the globally largest weights of the pruned layers after a round."""
        pool = dense_like(layers)
        count = self._kept(sum(mask.numel() for mask in pool.values()), round, max_rounds)
        return shrink_globally(magnitude({name: weights[name] for name in pool}), pool, max(1, count))

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge the models, set the strength after round 0, and prune."""
        mean = super().aggregate(server, merged)
        extra, masks = self._with_strength(server, merged), server.masks
        if self.groups == "layers":
            masks = self._smallest_dropped(mean.weights, masks, server.round, int(server.extra["plan"]["rounds"]))
        elif (server.round + 1) % self.reconfigure_every == 0:
            groups = groups_of(server.extra["units"])
            live = live_units(groups, mean.weights, self.threshold)
            masks = unit_masks(groups, {n: units for n, units in live.items() if not bool(units.all())}, mean.weights)
        return replace(mean, weights=apply(mean.weights, masks), masks=masks, extra=extra)

    def _with_strength(self, server: ServerState, merged: Merged) -> dict[str, Weights]:
        """Return the server's trees, with the strength ``r * loss / ((1 - r) * norms)`` after the first round."""
        extra = dict(server.extra)
        losses = [report["first_loss"] for report in merged.reports.values() if "first_loss" in report]
        if self.strength is None and "penalty" not in extra and losses:
            if self.groups == "units":
                norms = float(unit_lasso(groups_of(server.extra["units"]), server.weights))
            else:
                norms = sum(float(server.weights[name].norm()) for name in server.masks)
            strength = self.ratio * sum(losses) / len(losses) / ((1 - self.ratio) * norms)
            extra["penalty"] = {"strength": server.extra["plan"]["rounds"].new_tensor(strength)}
        return extra

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with the mask of the schedule; which units a penalty removes is not known in advance."""
        masks = server.masks
        if self.groups == "layers" and round > 0:
            masks = self._smallest_dropped(server.weights, masks, round - 1, int(server.extra["plan"]["rounds"]))
        return replace(server, round=round, weights=apply(server.weights, masks), masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the live units, or of dense training between pruned messages."""
        if self.groups == "units":
            return super().costs(narrow_facts(facts))
        size = sum(w.numel() for n, w in facts.message.weights.items() if n not in facts.buffers)
        pool = sum(mask.numel() for mask in facts.message.masks.values())
        now, last = facts.view.round, facts.view.max_rounds
        dense = 3 * facts.epochs * facts.samples * forward_flops(facts.layers)
        return Costs(
            flops_paper=dense,
            flops_analytic=dense,
            bytes_down_paper=BYTES_PER_WEIGHT * cubic(self.initial_density, self.density, now, last) * size,
            bytes_up_paper=BYTES_PER_WEIGHT * (size - pool + self._kept(pool, now, last)),
        )
