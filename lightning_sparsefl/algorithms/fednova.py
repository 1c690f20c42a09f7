"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020, arXiv:2007.07481; sections are numbered as there.

A client's change is divided by a_k, the norm of the coefficients with which its gradients enter it, so that clients
with more local steps do not count more. The server multiplies the mean by the mean of a_k, which clients send. With
equal a_k it is FedAvg; it is made for clients with different `federation.local_epochs` or numbers of samples.

Departures from the authors' code:

- a_k is exact for SGD with momentum, Nesterov's momentum, learning rates that change, and the proximal term. With `mu`,
  the code adds the term in place to the momentum buffer, and a_k is an approximation.
- As in the code, the server multiplies by the mean of a_k, or, with `mu` above 0, by the mean number of steps.
- Server momentum is `federation.server_optimizer`, whose D is the mean of normalised changes. Its moments are therefore
  taken before the multiplication by the mean of a_k, which in the code comes first.
- A client without a step sends nothing.
- ``variant="local_lr"`` is what the code of PerFedMask (ICLR 2023, Tables 1 and 7) calls FedNova: the learning rates of
  a client are multiplied by the ratio of the mean of a_k over all clients to its own, and weights are merged as by
  FedAvg. The ratio is computed before training, from the batches of round 0 and the option `momentum`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.callbacks import ProximalTerm, StepMeter
from lightning_sparsefl.cost import BYTES_PER_WEIGHT
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates
from lightning_sparsefl.sparse.masks import subtract
from lightning_sparsefl.sparse.moments import wide
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedNova(FederatedAlgorithm):
    """FedAvg of changes that are normalised by the lengths of the clients' local training."""

    variant: Literal["normalized", "local_lr"] = "normalized"
    """Whether changes are normalised, as in the paper, or learning rates, as in the code of PerFedMask."""
    mu: float = 0.0
    """Strength of a proximal term in the clients' loss, >= 0; 0 with `local_lr`."""
    momentum: float = 0.9
    """Momentum of the clients' SGD, in [0, 1), which `local_lr` must know before training; else it is measured."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.mu >= 0, "algorithm.mu", self.mu, "a number >= 0")
        fits = self.mu == 0 or self.variant == "normalized"
        require(fits, "algorithm.mu", self.mu, "0 with `algorithm.variant: local_lr`, which has no proximal term")
        require(0 <= self.momentum < 1, "algorithm.momentum", self.momentum, "a number in [0, 1)")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights, the names of buffers, and for `local_lr` the ratios of learning rates."""
        extra: dict[str, Weights] = {"buffers": {name: torch.zeros(0, device=fleet.device) for name in fleet.buffers}}
        if self.variant == "local_lr":
            norms, samples = torch.zeros(2, max(view.id for view in fleet.views) + 1)
            for view in fleet.views:
                norms[view.id], samples[view.id] = self._planned(fleet.batches(view)), view.num_examples
            mean = (norms * samples).sum() / samples.sum()
            extra["nova"] = {"rates": torch.where(norms > 0, mean / norms, 1.0).to(fleet.device)}
        return ServerState(round=0, weights=weights, extra=extra)

    def _planned(self, steps: int) -> float:
        """Return a_k of a number of steps at a constant learning rate."""
        meter = StepMeter(mu=0)
        for _ in range(steps):
            meter.count({"lr": 1.0, "momentum": self.momentum})
        return meter.path

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the weights, with the names of buffers, or with the ratio of the client's learning rates."""
        if self.variant == "local_lr":
            return Message(weights=server.weights, extra={"nova": {"rate": server.extra["nova"]["rates"][view.id]}})
        named = server.extra["buffers"]
        return Message(weights=server.weights, extra={"buffers": named} if named else {})

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the weights alone."""
        return Message(weights=server.weights)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the proximal term, and what measures or scales the learning rates."""
        if self.variant == "local_lr":
            return [ScaleLearningRates(float(message.extra["nova"]["rate"]))]
        terms: list[Callback] = [ProximalTerm(self.mu, anchor=message.weights)] if self.mu else []
        return [*terms, StepMeter(self.mu, owner="FedNova")]

    def train(self, message: Message, client: Client) -> Update:
        """Train, and divide the change of the parameters by a_k."""
        if self.variant == "local_lr":
            return super().train(message, client)
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)
        meter = next(callback for callback in callbacks if isinstance(callback, StepMeter))
        if not meter.norm:
            return Update(weights={}, weight=client.num_examples, metrics=result.metrics)
        moved, norm = subtract(result.weights, message.weights), meter.norm
        sent = {"norm": norm, "steps": float(meter.steps)} if self.mu else {"norm": norm}
        like = wide(next(iter(moved.values())))
        return Update(
            weights=_scaled(moved, 1 / norm, message.extra.get("buffers", {})),
            kind="difference",
            weight=client.num_examples,
            extra={"nova": {key: like.new_tensor(value) for key, value in sent.items()}},
            metrics=result.metrics,
        )

    def trained(self, message: Message, update: Update) -> Weights:
        """Return what local training ended with, from the normalised change."""
        if update.kind == "difference":
            moved = _scaled(update.weights, update.extra["nova"]["norm"], message.extra.get("buffers", {}))
            update = replace(update, weights=moved)
        return super().trained(message, update)

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Multiply the mean of normalised changes by the mean of a_k."""
        sent = merged.extra.get("nova", {})
        if sent:  # otherwise no client has taken a step, or learning rates were scaled
            scale = sent["steps"] if self.mu else sent["norm"]
            merged = replace(merged, weights=_scaled(merged.weights, scale, server.extra["buffers"]))
        return super().aggregate(server, merged)

    def costs(self, facts: CostFacts) -> Costs:
        """Return FedAvg's costs with the number a_k in the upload, and with `mu` the number of steps."""
        costs = super().costs(facts)
        if self.variant == "local_lr":
            return costs
        return replace(costs, bytes_up_paper=costs.bytes_up_paper + BYTES_PER_WEIGHT * (2 if self.mu else 1))


def _scaled(weights: Weights, factor: Tensor | float, buffers: Weights) -> dict[str, Tensor]:
    """Multiply parameters by a number, and leave buffers."""
    return {name: value if name in buffers else value * factor for name, value in weights.items()}
