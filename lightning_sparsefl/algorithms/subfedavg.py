"""Sub-FedAvg: Personalized Federated Learning by Structured and Unstructured Pruning under Data Heterogeneity.

Vahidian, Morafah, Lin; ICDCS Workshops 2021, arXiv:2105.00562, Algorithms 1 (unstructured pruning) and 2 (hybrid).

Each client prunes a mask of its own by magnitude. It compares the masks that the weights after the first and after the
last local epoch would give; while these still differ, the client has not reached its target density, and the pruned
model is accurate enough, it keeps the second one. The server averages each weight over the clients that keep it.

``channels=True`` is the hybrid form, Sub-FedAvg (Hy): only fully connected layers are pruned weight by weight; of the
other layers each client removes whole channels, those with the smallest scales of their norms, which a penalty makes
small. Both prunings compare candidates and scores on their own. The authors set ``density=0.5`` and
``min_change=5e-4`` there. With `federation.execution: cut` clients train a model without the removed channels.

Departures from the authors' code:

- The score that gates a pruning is computed on the client's validation data, or on its training data
  (``gate="train"``); the code uses test data.
- The last candidate is that of the last local epoch; the code computes it after the fifth.
- Only tensors of two or more dimensions are pruned; the code also prunes the weights of norms.
- Of equal magnitudes or scales the higher index is dropped, so that the number of what is dropped is exact.
- With one local epoch both candidates are the same, and no client ever prunes, as in the paper.
- Hybrid: as in the code, removing channels does not end at `density` but at `min_channels`; whether Algorithm 2 of the
  paper ends it at the target was not checked. Units of linear layers with norms are channels too, and all matrices,
  such as those of embeddings, are pruned as fully connected layers. A channel with several norms has the sum of their
  scales. Biases of fully connected layers count as kept; the code counts them as pruned. The penalty is on by default;
  the authors' script does not switch it on.

The row of FedSpa's tables (arXiv:2201.11380, Table 1) follows the code of DisPFL by the same group: it prunes the full
step until the density is reached (``last_step="full"``), gates on training data, and merges under the masks from before
the pruning, where dropped weights count as zeros (``votes="held"``). It also takes the mean difference of masks over
all tensors including those that are never pruned; a larger `min_change` has the same effect.

The forward passes of the gate over validation data are not in the FLOPs, since their number is not known; those over
training data are in ``flops/train``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_sparsefl.algorithms import _personal_masks as personal
from lightning_sparsefl.callbacks import EpochSnapshots, GroupPenalty
from lightning_sparsefl.cost import forward_flops, narrow_biases
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.sparse.masks import apply, changed, density, intersect, kept, mean_distance, same
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.sparse.prune import below_percentile, prune_percentile
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.sparse.submodel import widen
from lightning_sparsefl.sparse.unit_scales import drop_smallest_scales, scaled_groups, scaled_units, unit_scales
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Message, ServerState, Update, Weights

_messages = WarningCache()
_SHORTEST = 0.05
"""Largest fraction that a last, shorter pruning drops, as in the authors' code."""
_LONG, _LESS = 0.16, 0.05
"""Fraction above which the hybrid form's last pruning drops less, and by how much, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class SubFedAvg(FederatedAlgorithm):
    """A mask for each client, pruned by magnitude while training still changes it."""

    uploads_shared = True

    density: float = 0.7
    """Fraction of the parameters, biases included, at which a client stops pruning, in (0, 1]."""
    step: float = 0.1
    """Fraction of a layer's kept weights that one pruning drops, in [0, 1)."""
    min_change: float = 1e-4
    """Difference of the candidate masks after the first and the last epoch, as a mean over layers, that a pruning must
    exceed; >= 0."""
    min_score: float = 0.5
    """Score of the pruned model that a pruning must exceed."""
    gate: Literal["val", "train"] = "val"
    """Split of the client's data that the score is computed on."""
    metric: str = "val_acc"
    """Name of the score, which the module's `validation_step` logs."""
    last_step: Literal["short", "full"] = "short"
    """Whether the last pruning stops near `density`, or drops as much as the others."""
    votes: Literal["kept", "held"] = "kept"
    """Coordinates that are merged: those that the pruned mask keeps, or those of the mask before it, some of them 0."""
    channels: bool = False
    """Whether to remove channels with small scales of their norms, and prune weight by weight only fully connected
    layers (the hybrid form)."""
    channel_step: float = 0.45
    """Quantile of a layer's scales up to which one pruning removes channels, at least one, in [0, 1), with
    `channels`."""
    min_channel_change: float = 0.01
    """Fraction of the channels in which the candidates after the first and the last epoch differ, which a pruning must
    exceed, >= 0, with `channels`."""
    min_channels: tuple[int, ...] = (3, 8)
    """Smallest numbers of channels, >= 1, of the layers with norms in their order, with `channels`; the last one holds
    for all further layers."""
    penalty: float = 1e-4
    """Strength of the penalty on the absolute scales of norms, >= 0, with `channels`."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(0 <= self.step < 1, "algorithm.step", self.step, "a number in [0, 1)")
        require(0 <= self.channel_step < 1, "algorithm.channel_step", self.channel_step, "a number in [0, 1)")
        for name in ("min_change", "min_channel_change", "penalty"):
            require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), "a number >= 0")
        floors = bool(self.min_channels) and min(self.min_channels) >= 1
        require(floors, "algorithm.min_channels", self.min_channels, "one or more whole numbers >= 1")
        personal.require_gate(self.min_score, self.metric)

    @property
    def without_validation(self) -> str | None:
        """Scores of the gate on training data."""
        return "set `algorithm.gate: train`" if self.gate == "val" else None

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Start with dense masks."""
        parameters = without(weights, fleet.buffers) if self.channels else fleet.trained(weights)
        state = personal.start(weights, fleet, parameters)
        if not self.channels:
            return state
        if not scaled_groups(fleet.units, weights):
            raise InvalidOption(
                "`SubFedAvg` finds no norm that scales hidden channels of the model, expected one for "
                "`algorithm.channels: true`; use a model with norms, or `channels: false`."
            )
        return replace(state, extra={**state.extra, "units": unit_tables(fleet.units)})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send m_k * w, and the mask if the client does not have it."""
        masks = personal.masks_of(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, and prune it if the gate is open."""
        snapshots = EpochSnapshots(epochs=[1])
        groups = scaled_groups(client.units, message.weights) if self.channels else ()
        narrow = _to_cut(groups, message.masks)
        callbacks = [*self.callbacks(message, client), snapshots]
        result = client.fit(message.weights, message.masks, callbacks=callbacks, units=narrow or None)
        early = _whole(snapshots.snapshots.get(1, message.weights), groups, narrow, message.weights)
        masks = self._pruned(early, result.weights, message.masks, client)
        if groups:
            masks = self._without_channels(early, result.weights, masks, groups, client)
        if all(torch.equal(early[name], result.weights[name]) for name in message.masks):
            _messages.warn(
                "Clients of `SubFedAvg` prune only if the first and the last local epoch would give other masks, and "
                "they have one epoch; expected `trainer.max_epochs` of 2 or more."
            )
        return Update(
            weights=apply(result.weights, masks),
            votes=masks if self.votes == "kept" else None,
            shared=None if masks is message.masks else {"masks": masks},
            metrics=result.metrics,
        )

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the penalty on the scales."""
        if not (self.channels and self.penalty):
            return []
        return [GroupPenalty(self.penalty, stairs=None, groups="scales")]

    def _pruned(self, early: Weights, trained: Weights, masks: Masks, client: Client) -> Masks:
        """Return the pruned masks if they pass the three tests, else the same masks."""
        fraction = self._fraction(density(masks))
        first, last = (self._candidate(weights, masks, self.step) for weights in (early, trained))
        if fraction == 0 or mean_distance(first, last) <= self.min_change:
            return masks
        pruned = {**masks, **self._candidate(trained, masks, fraction)}
        score = personal.score(client, apply(trained, pruned), self.gate, self.metric)
        return pruned if score > self.min_score else masks

    def _fraction(self, left: float) -> float:
        """Return the fraction that a pruning drops at a density; 0 once the target is reached."""
        if left <= self.density:
            return 0.0
        if self.last_step == "full" or left - self.density >= self.step:
            return self.step
        rest = (left - self.density) / left
        if self.channels:
            return rest - _LESS if rest > _LONG else rest
        return min(_SHORTEST, rest)

    def _candidate(self, weights: Weights, masks: Masks, fraction: float) -> Masks:
        """Return the masks of the layers without their smallest weights."""
        layers = {name: masks[name] for name in maskable(masks) if not self.channels or masks[name].dim() == 2}
        return prune_percentile(magnitude({name: weights[name] for name in layers}), layers, fraction)

    def _without_channels(
        self, early: Weights, trained: Weights, masks: Masks, groups: Sequence[UnitGroup], client: Client
    ) -> Masks:
        """Return the masks without the channels of small scales if they pass the two tests, else the same masks."""
        held = scaled_units(groups, masks)
        first, last = (self._channels(groups, weights, held) for weights in (early, trained))
        live = ({name: kept[held[name]] for name, kept in candidate.items()} for candidate in (first, last))
        if changed(*live) <= self.min_channel_change:
            return masks
        fewer = intersect(masks, unit_masks(groups, last, masks))
        score = personal.score(client, apply(trained, fewer), self.gate, self.metric)
        return fewer if score > self.min_score else masks

    def _channels(self, groups: Sequence[UnitGroup], weights: Weights, held: Masks) -> Masks:
        """Return the channels of each layer without those of the smallest scales."""
        return drop_smallest_scales(unit_scales(groups, weights), held, self.channel_step, self.min_channels)

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with the mask of a client whose gate was always open."""
        if self.channels:
            return self._hybrid_profile(server, round)
        first = server.extra["first_masks"]
        layers, size = set(maskable(first)), kept(first)

        def prune(left: personal.Counts) -> personal.Counts:
            fraction = self._fraction(sum(left.values()) / size)
            return {n: c - (below_percentile(fraction, c) if n in layers else 0) for n, c in left.items()}

        return personal.expected(server, round, prune)

    def _hybrid_profile(self, server: ServerState, round: int) -> ServerState:
        masks, weights = server.extra["first_masks"], server.weights
        groups = scaled_groups(groups_of(server.extra["units"]), weights)
        for _ in range(personal.participations(server, round)):
            after = {**masks, **self._candidate(weights, masks, self._fraction(density(masks)))}
            last = self._channels(groups, weights, scaled_units(groups, masks))
            after = intersect(after, unit_masks(groups, last, masks))
            if same(after, masks):
                break
            masks = after
        return replace(server, round=round, masks=masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the client's sparse model, and of the gates on training data."""
        masks = facts.message.masks
        if self.channels:
            facts = replace(facts, layers=narrow_biases(facts.layers, masks))
        costs = super().costs(facts)
        gates = (self._fraction(density(masks)) > 0) + self.channels if self.gate == "train" else 0
        passes = gates * facts.samples * forward_flops(facts.layers, masks)
        return replace(costs, flops_analytic=costs.flops_analytic + passes)


def _to_cut(groups: Sequence[UnitGroup], masks: Masks) -> Masks:
    """Return the channels of the layers that have lost some, where a smaller layer computes the same."""
    held = scaled_units([group for group in groups if not group.masks_only], masks)
    return {name: units for name, units in held.items() if not bool(units.all())}


def _whole(weights: Weights, groups: Sequence[UnitGroup], narrow: Masks, like: Weights) -> Weights:
    """Return weights of a module that may have been cut in the shapes of the full one."""
    if all(like[name].shape == value.shape for name, value in weights.items()):
        return weights
    return widen(weights, groups, narrow, like, zeros=True)
