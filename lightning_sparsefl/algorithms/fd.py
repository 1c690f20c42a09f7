"""Federated Dropout (FD), and its extended form eFD.

Caldas, Konecny, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", arXiv:1812.07210, section 3.2; eFD: Horvath et al., FjORD, arXiv:2102.13451, section 5.1.

In every round each client trains the same fraction of the units of every hidden layer, drawn at random, as a narrow
network of its own. The server adds the mean of the changes, weighted by samples, where a unit that a client did not
train counts as unchanged. With ``rate="capacity"`` (eFD) the fraction is the client's capacity. Clients are scored with
the whole model.

Departures from the paper:

- Batch norms use the statistics of the current batch and keep none, since running statistics would mix networks of
  different units; the paper's networks have no norms.
- The number of units is rounded to the nearest one with `keep`, and up with ``rate="capacity"``, as in FjORD. The paper
  compresses weights too, which is not part of the method here.
- Dropped units are drawn per client, as in the authors' code; ``per="round"`` draws one network for the whole cohort.
- The published rows of FedLPS (Table I, eFD) come without code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import LightningModule

from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import derive_seed
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.sparse.width import held_units, make_norms_static, ranked_units
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FD(FederatedAlgorithm):
    """Each client trains random units of every layer: the same fraction for all clients, or its capacity."""

    rate: Literal["keep", "capacity"] = "keep"
    """Source of the fraction of units that a client trains: `keep`, the same for all clients (FD), or the client's
    capacity (`federation.capacities`; eFD)."""
    keep: float = 0.75
    """Fraction of the units of each layer that every client trains with ``rate="keep"``, in (0, 1]."""
    per: Literal["client", "round"] = "client"
    """Whether each client of a round draws its own units, or the ranking of units is common to the cohort."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.keep <= 1, "algorithm.keep", self.keep, "a number in (0, 1]")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client" if self.rate == "capacity" else None

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the positions of the units, from which the server makes masks."""
        return ServerState(round=0, weights=weights, extra={"units": unit_tables(fleet.units)})

    def kept(self, groups: Sequence[UnitGroup], view: ClientView) -> Masks:
        """Return the units of each group that a client trains in a round.

        Args:
            groups: Groups of units of the model.
            view: View of the client.
        """
        seed = derive_seed(view.seed, "FD", *([view.id] if self.per == "client" else []))
        if self.rate == "keep":
            return ranked_units(groups, self.keep, "random", turn=view.round, seed=seed, rounding="nearest")
        return ranked_units(groups, view.capacity, "random", turn=view.round, seed=seed)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's units of the round."""
        if (self.keep if self.rate == "keep" else view.capacity) == 1:
            return Message(weights=server.weights)
        groups = groups_of(server.extra["units"])
        masks = unit_masks(groups, self.kept(groups, view), server.weights)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the whole model."""
        return Message(weights=server.weights)

    def train(self, message: Message, client: Client) -> Update:
        """Train the units of the message, and return the change."""
        kept = held_units(client.units, message.masks)
        result = client.fit(message.weights, callbacks=self.callbacks(message, client), units=kept)
        return Update(
            weights=subtract(result.weights, message.weights),
            kind="difference",
            weight=client.num_examples,
            metrics=result.metrics,
        )

    def reducer(self) -> Reducer:
        """Return the mean in which units that a client did not train count as unchanged."""
        return PlainMean()

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the narrow network, including those of its biases."""
        return super().costs(narrow_facts(facts))
