"""FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane, NeurIPS 2021, arXiv:2102.13451, sections 3 and 4.

A client holds the first ``ceil(p_max C)`` units of every layer, where p_max is the largest rate within its capacity. In
each step it draws one of the rates up to p_max and trains the first units of that rate alone (ordered dropout), so that
a network of any of the rates can be taken from the model. With `distill`, the network of p_max, trained on the same
batch, teaches the drawn one. Each coordinate is averaged over the clients that hold it, weighted by samples, which
equals the merge in nested stripes of the authors' code. A client is scored with its network of p_max.

Departures from the paper and the authors' code:

- Batch norms use the statistics of the current batch and keep none; the authors keep running statistics for each rate.
- Recurrent layers lose their dropped units where other layers read them, but not in the recurrence.
- Momentum and weight decay, if the module's optimizer has them, also move units that a step has dropped. The authors'
  runs have no momentum.
- Scores of the rates below p_max are not logged. Temperatures and mixtures of both losses, which the paper allows, are
  not offered: the drawn network learns from its teacher alone, as in the code.
- With `distill`, all positions of a sequence count, also padded ones, which the loss of the largest network leaves out.
- The published row of FedLPS (Table I, Fjord) comes without code.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks import OrderedDropout
from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import derive_seed
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import held_units, largest_rate, make_norms_static, prefix_units
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FjORD(FederatedAlgorithm):
    """Each client trains nested networks of the first units, up to its capacity; one is drawn for every step."""

    rates: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Widths that steps draw from, in (0, 1]; a client has those up to its capacity (`federation.capacities`)."""
    distill: bool = False
    """Whether the client's largest network teaches the drawn one, on the same batch (self-distillation)."""
    head: str | None = None
    """Name of the layer with the logits, for `distill`; null = the last linear layer."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        fits = bool(self.rates) and all(0 < rate <= 1 for rate in self.rates)
        require(fits, "algorithm.rates", self.rates, "one or more numbers in (0, 1]")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of all widths."""
        return "trains all widths on every client"

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the positions of the units, from which the server makes masks."""
        for view in fleet.views:
            largest_rate(self.rates, view.capacity)  # raises if the capacity is too small
        return ServerState(round=0, weights=weights, extra={"units": unit_tables(fleet.units)})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's largest network, and its width."""
        rate = largest_rate(self.rates, view.capacity)
        extra = {"width": {"rate": torch.tensor(rate, dtype=torch.float64)}}
        if rate == 1:
            return Message(weights=server.weights, extra=extra)
        groups = groups_of(server.extra["units"])
        masks = unit_masks(groups, prefix_units(groups, rate), server.weights)
        return Message(weights=apply(server.weights, masks), masks=masks, extra=extra)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return ordered dropout over the client's rates."""
        rates = self._within(message)
        if len(rates) == 1 and not self.distill:
            return []
        seed = derive_seed(*client.key("rates"))
        return [OrderedDropout(rates, seed=seed, distill=self.distill, head=self.head, groups=client.units)]

    def _within(self, message: Message) -> list[float]:
        """Return the rates that a client trains."""
        largest = float(message.extra["width"]["rate"])
        return sorted(rate for rate in self.rates if rate <= largest)

    def alike(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the largest width of the client's network."""
        return largest_rate(self.rates, view.capacity)

    def train(self, message: Message, client: Client) -> Update:
        """Train the nested networks."""
        kept = held_units(client.units, message.masks)
        result = client.fit(message.weights, callbacks=self.callbacks(message, client), units=kept)
        return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the bytes of the largest network, and the mean FLOPs over the client's rates.

        With `distill`, the passes of the largest network come on top.
        """
        whole = self._costs_of(facts, max(self._within(facts.message)))
        each = [self._costs_of(facts, rate) for rate in self._within(facts.message)]
        paper, analytic = (sum(getattr(c, f"flops_{name}") for c in each) / len(each) for name in ("paper", "analytic"))
        return replace(
            whole,
            flops_paper=paper + self.distill * whole.flops_paper,
            flops_analytic=analytic + self.distill * whole.flops_analytic,
        )

    def _costs_of(self, facts: CostFacts, rate: float) -> Costs:
        """Return the costs of training the network of one rate."""
        units = facts.model.units
        masks = unit_masks(units, prefix_units(units, rate), facts.message.weights) if rate < 1 else {}
        narrow = replace(facts.message, masks=masks)
        return super().costs(narrow_facts(replace(facts, message=narrow)))
