"""Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients.

Li, Sun, Li, Pu, Li, Chen; MobiCom 2021, doi:10.1145/3447993.3483278; a baseline in Table I of FedLPS, arXiv:2412.07216.

Each client keeps a model of its own, from which it removes units (channels, neurons, hidden states) with small norms,
helped by a group lasso, while its accuracy is high enough. Clients upload what is left. The server averages a weight
only where all clients of the cohort have it, and a client replaces only such weights by the server's.

``own=False`` is the row of FedLPS's table: clients keep masks but no models, start from the server's weights under
them, remove units before training and not after it, and the mean of the changes is over the cohort. It has no penalty,
since the authors' program computes one that has no gradient: ``penalty=0``.

Departures from the paper, of which no code of the authors is public:

- Units are removed after training, and only if the score of the trained model on the client's own data exceeds
  `min_score`. Two public programs, of Plato and of FedLPS, do so before training.
- The strength of the penalty is not known to be that of the paper; the other defaults are those of Plato's program.
- Weights that all clients of the last cohort had are replaced, also on clients that were not in it. A client that takes
  part for the first time receives all weights. The mean is uniform. Plato's program takes the mean of all weights over
  the cohort, by samples, since its test for common ones never holds.
- As masks diverge, few weights are common. ``common`` in the clients' metrics is the part of its model that a client
  received.
- A unit's norm is the sum of the magnitudes of its outgoing weights; biases and norms are removed with it, and so
  are the weights that read it. The two programs remove outgoing weights alone, and count weights where `density` counts
  units.

Costs are those of the units that a client begins a round with, also in a round in which it removes some. The forward
passes of the gate over validation data are not in the FLOPs, since their number is not known; those over
training data are in ``flops/train``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.algorithms import _personal_masks as personal
from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops, narrow_biases
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import apply, counts, density, intersect, same, subtract
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.sparse.prune import prune_percentile
from lightning_sparsefl.sparse.unit_lasso import present_groups
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks, unit_norms
from lightning_sparsefl.sparse.width import used_units
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
class Hermes(FederatedAlgorithm):
    """A model of its own for each client, without the units that it needs least."""

    uploads_shared = True

    density: float = 0.5
    """Fraction of the units at which a client stops removing them, in (0, 1]."""
    step: float = 0.2
    """Fraction of a layer's units that are removed at once, in [0, 1)."""
    min_score: float = 0.6
    """Score of a client's model that must be exceeded for units to be removed."""
    gate: Literal["val", "train"] = "val"
    """Split of the client's data that the score is computed on."""
    metric: str = "val_acc"
    """Name of the score, which the module's `validation_step` logs."""
    penalty: float = 1e-4
    """Strength of the group lasso over units, >= 0."""
    own: bool = True
    """Whether clients keep models of their own and share what all have, or train the server's (FedLPS's row)."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(0 <= self.step < 1, "algorithm.step", self.step, "a number in [0, 1)")
        require(self.penalty >= 0, "algorithm.penalty", self.penalty, "a number >= 0")
        personal.require_gate(self.min_score, self.metric)

    @property
    def without_validation(self) -> str | None:
        """Scores of the gate on training data."""
        return "set `algorithm.gate: train`" if self.gate == "val" else None

    @property
    def sends_unreceived(self) -> str | None:
        """A client's own model, of which it received what the whole cohort had."""
        return "has clients send more than they received, unless `algorithm.own` is false" if self.own else None

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Start with whole models."""
        if not fleet.units:
            raise InvalidOption("`Hermes` finds no units in the model; expected hidden channels, neurons or states.")
        state = personal.start(weights, fleet, without(weights, fleet.buffers))
        return replace(state, extra={"plan": state.extra["plan"], "units": unit_tables(fleet.units)})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the weights that the client and all others have, or all of a client without a record.

        The masks say what is sent; what the client holds is in its memory.
        """
        masks: Masks = server.masks or view.shared.get("masks", {})
        if self.own and masks:
            masks = intersect(masks, server.extra.get("common", {}))
        return Message(weights=apply(server.weights, masks), masks=masks)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send nothing to a client that has a model of its own."""
        return Message(weights={}) if self.own and "masks" in view.shared else self.download(server, view)

    def train(self, message: Message, client: Client) -> Update:
        """Train the live units, and remove some afterwards; with ``own=False`` before."""
        held = {name: units.cpu() for name, units in client.memory.get("units", _all_units(client.units)).items()}
        start = self.personalize(message, client, merged=True)
        kept: Masks = held if self.own else self._pruned(start, held, client)
        whole = all(bool(units.all()) for units in kept.values())
        callbacks = [*self.callbacks(message, client), *self._penalty(message, client, kept)]
        result = client.fit(start, callbacks=callbacks, units=None if whole else kept)
        kept = self._pruned(result.weights, kept, client) if self.own else kept
        masks = unit_masks(client.units, kept, result.weights)
        trained = apply(result.weights, masks)
        return Update(
            weights=trained if self.own else subtract(trained, message.weights),
            kind="weights" if self.own else "difference",
            votes=masks,
            shared=None if client.memory and same(kept, held) else {"masks": masks},
            memory={"units": kept, **({"weights": trained} if self.own else {})},
            metrics={**result.metrics, "common": density(message.masks)},
        )

    def personalize(self, message: Message, client: Client, merged: bool = False) -> Weights:
        """Return the client's own model.

        Args:
            message: Message from :meth:`download_for`.
            client: The client, with its memory.
            merged: Whether the received weights replace the client's, as before training.
        """
        own: Weights | None = client.memory.get("weights")
        if own is None:
            return message.weights
        if not merged:
            return {**message.weights, **own}
        masks = message.masks
        return {n: torch.where(masks[n], w, own[n]) if n in masks else w for n, w in message.weights.items()}

    def _penalty(self, message: Message, client: Client, kept: Masks) -> list[Callback]:
        if not self.penalty:
            return []
        units = partial(present_groups, client.units, kept, message.weights)
        return [GroupPenalty(self.penalty, stairs=None, groups="units", units=units)]

    def _pruned(self, weights: Weights, kept: Masks, client: Client) -> Masks:
        """Return the units without the smallest ones of each layer, if the score is high enough."""
        if self.step == 0 or density(kept) <= self.density:
            return kept
        if personal.score(client, weights, self.gate, self.metric) <= self.min_score:
            return kept
        return self._smallest_dropped(client.units, weights, kept)

    def _smallest_dropped(self, groups: Sequence[UnitGroup], weights: Weights, kept: Masks) -> Masks:
        norms = {name: norm.cpu() for name, norm in unit_norms(groups, weights).items()}
        return {**kept, **prune_percentile(norms, {name: kept[name].cpu() for name in norms}, self.step)}

    def may_vote(self, message: Message) -> Masks:
        """Return no masks, since clients also have weights that were not sent."""
        return {}

    def reducer(self) -> Reducer:
        """Return the mean over the clients that have a coordinate, or over the cohort."""
        return CoverageMean() if self.own else PlainMean()

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Move the weights that all clients of the cohort have, and store which these are."""
        mean = super().aggregate(server, merged)
        if not self.own:
            return mean
        common = {name: count == merged.clients for name, count in merged.voters.items()}
        weights = {
            name: torch.where(common[name], new, server.weights[name]) if name in common else new
            for name, new in mean.weights.items()
        }
        partly = {name: mask for name, mask in common.items() if not bool(mask.all())}
        return replace(mean, weights=weights, extra={**server.extra, "common": partly})

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with the masks of a client whose score was always high enough."""
        groups = groups_of(server.extra["units"])
        kept: Masks = _all_units(groups)
        for _ in range(personal.participations(server, round)):
            if density(kept) <= self.density:
                break
            kept = self._smallest_dropped(groups, server.weights, kept)
        return replace(server, round=round, masks=unit_masks(groups, kept, server.weights))

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the live units, and downloads of the weights that are common.

        The FLOPs of FedLPS's row do not count that a layer reads fewer units, as in all of its table.
        """
        message = facts.message
        live = facts.view.shared.get("masks", message.masks) if self.own else message.masks
        held = replace(facts, message=replace(message, masks=live), layers=narrow_biases(facts.layers, live))
        sent = counts(message.masks)
        down = sum(sent.get(n, w.numel()) for n, w in message.weights.items() if n not in facts.buffers)
        costs = replace(super().costs(held), bytes_down_paper=BYTES_PER_WEIGHT * down)
        kept = used_units(facts.model.units, {name: mask.float() for name, mask in live.items()}) if live else {}
        if self.gate == "train" and self.step > 0 and (not kept or density(kept) > self.density):
            gate = facts.samples * forward_flops(held.layers, live)
            costs = replace(costs, flops_analytic=costs.flops_analytic + gate)
        if self.own or not live:
            return costs
        rows = unit_masks(facts.model.units, kept, message.weights, incoming=False)
        forward = forward_flops(facts.layers, rows)
        return replace(costs, flops_paper=3 * facts.epochs * facts.samples * forward)


def _all_units(groups: Sequence[UnitGroup]) -> dict[str, torch.Tensor]:
    """Return unit masks that keep all units."""
    return {group.name: torch.ones(group.size, dtype=torch.bool) for group in groups}
