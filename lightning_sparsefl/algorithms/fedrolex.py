"""FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction.

Alam, Liu, Yan, Zhang, NeurIPS 2022, arXiv:2212.01548, section 3 and Algorithm 1.

FedRolex is HeteroFL with another choice of units: a client of rate r trains a window of ``ceil(r * C)`` consecutive
units of each layer, which moves on by one unit a round and begins anew behind the last unit, so that all units are
trained alike. Layers divide their outputs by r in training, batch norms have no running statistics, and each coordinate
is averaged over the participants that have it. Clients are scored with the whole model.

Departures from the paper and the authors' code:

- The window moves forward, as in the paper; the code's moves back (``direction="back"``). All clients of a round have
  the same window, also in the code; in the program of FedLPS (Table I) each has the window of its own participations.
- A window has ``ceil(r * C)`` units, as in the code, so that none is empty; the paper rounds down.
- In all runs of the paper a client draws its rate anew in every round (`federation.redraw_capacities`). Without that
  option a client's capacity is fixed.
- Gradients are clipped only with `trainer.gradient_clip_val`; in the code, to a norm of 1.
- The code averages convolutions evenly, and other layers by counts that accumulate over rounds. Here all layers are
  averaged alike.
- Batch norms use the statistics of the current batch in evaluation too; see HeteroFL.
- The paper's bytes count weights only; here masks are sent too, one bit for each unit and layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler, votes_on_own_classes
from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import held_units, largest_rate, make_norms_static, ranked_units
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Update, Weights

_STEPS = {"forward": 1, "back": -1, "fixed": 0}
"""Units that the window moves on in a round."""


@dataclass(frozen=True, kw_only=True)
class FedRolex(FederatedAlgorithm):
    """Each client trains a window of every layer's channels, which moves on by one channel a round."""

    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Widths, in (0, 1]; a client has the largest one up to its capacity (`federation.capacities`)."""
    direction: Literal["forward", "back", "fixed"] = "forward"
    """Movement of the window: forward (the paper), back (the authors' code), or fixed at the first units (HeteroFL)."""
    scaler: bool = True
    """Whether layers divide their outputs by the width in training."""
    label_mask: bool = False
    """Whether classes that a client does not have are excluded from its loss and its votes."""
    head: str | None = None
    """Name of the layer with the logits, for `label_mask`; null = the last linear layer."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        fits = bool(self.rates) and all(0 < rate <= 1 for rate in self.rates)
        require(fits, "algorithm.rates", self.rates, "one or more numbers in (0, 1]")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client" if max(self.rates) == 1 else None

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the positions of the units, from which the server makes masks."""
        for view in fleet.views:
            largest_rate(self.rates, view.capacity)  # raises if the capacity is too small
        return ServerState(round=0, weights=weights, extra={"units": unit_tables(fleet.units)})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the window of the round in the client's width, and the width."""
        rate = largest_rate(self.rates, view.capacity)
        extra = {"width": {"rate": torch.tensor(rate, dtype=torch.float64)}}
        if rate == 1:
            return Message(weights=server.weights, extra=extra)
        groups = groups_of(server.extra["units"])
        kept = ranked_units(groups, rate, "rolling", turn=_STEPS[self.direction] * view.round)
        masks = unit_masks(groups, kept, server.weights)
        return Message(weights=apply(server.weights, masks), masks=masks, extra=extra)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the whole model."""
        return Message(weights=server.weights)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the scaling of hidden layers and the mask of logits."""
        rate, found = float(message.extra["width"]["rate"]), list[Callback]()
        if self.scaler and rate < 1:
            found.append(OutputScaler(dict.fromkeys(name for group in client.units for name in group.layers), rate))
        if self.label_mask:
            found.append(
                LabelMask(head_of(message.weights, self.head, client.uses, "with `algorithm.head`"), client.id)
            )
        return found

    def alike(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the width of the client's network."""
        return largest_rate(self.rates, view.capacity)

    def train(self, message: Message, client: Client) -> Update:
        """Train the window of the message."""
        kept = held_units(client.units, message.masks)
        result = client.fit(message.weights, callbacks=self.callbacks(message, client), units=kept)
        votes = votes_on_own_classes(message, result.callbacks)
        return Update(weights=result.weights, votes=votes, metrics=result.metrics)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the narrow network, including those of its biases."""
        return super().costs(narrow_facts(facts))
