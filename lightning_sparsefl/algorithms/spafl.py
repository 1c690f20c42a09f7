"""SpaFL: Communication-Efficient Federated Learning with Sparse Models and Low Computational Overhead.

Kim, Saad, Debbah, Hong, NeurIPS 2024, arXiv:2406.00431, section 3 and Algorithm 1.

Every client keeps its own weights. Each output unit of a layer has a threshold, and is off unless the mean magnitude of
its weights exceeds it. Weights and thresholds are trained together; only thresholds are sent and averaged, with equal
weights of the clients. When a common threshold has changed, all clients move the weights of its unit the other way.

Departures from the paper and the authors' code:

- A client that was not drawn follows the changes of the common thresholds at its next participation, one after another,
  which is exact: it receives the thresholds of all rounds since its last one, and starts from the run's initial weights
  if it was never drawn. They are measured, but not in the paper's bytes, which count those of a round. In one of the
  authors' programs only the drawn clients follow, and by the last change.
- The programs for CIFAR pass gradients to thresholds only where a mean magnitude is more than 1 away from the
  threshold, so that these are hardly trained; here the gradient passes unchanged, as in the paper. The programs for
  Fashion-MNIST and CIFAR-100 also increase the strength over the rounds.
- Thresholds stay in [-5, 5]; the code computes the bounded values and drops them.
- The optimizer starts anew in every round; in the program for Fashion-MNIST each client keeps its momentum.
- A client is scored with its own weights under its own last thresholds, and there is no global model.
- Density in the costs is that after the client's last participation, and 1 before it. The sums over rows of weights
  that thresholds need in every step are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import listed, maskable
from lightning_sparsefl.sparse.thresholds import follow_all, keep_rows, live_share
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Merged,
    Message,
    ServerState,
    Shared,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class SpaFL(FederatedAlgorithm):
    """Clients keep their weights and share one threshold for each unit."""

    has_global_model = False

    strength: float = 0.002
    """Strength of the term that increases thresholds (alpha), >= 0."""
    layers: tuple[str, ...] = ("*",)
    """Patterns of the names of weights whose units have thresholds."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.strength >= 0, "algorithm.strength", self.strength, "a number >= 0")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Start with thresholds of 0."""
        found = maskable(fleet.trained(weights))
        names = [name for name in found if any(fnmatchcase(name, pattern) for pattern in self.layers)]
        fits = bool(self.layers) and all(any(fnmatchcase(n, pattern) for n in found) for pattern in self.layers)
        require(fits, "algorithm.layers", self.layers, f"patterns that each match some of {listed(found)}")
        history = {name: weights[name].new_zeros(1, len(weights[name])) for name in names}
        buffers = {name: weights[name] for name in weights if name in fleet.buffers}
        turns = {"every": torch.tensor(len(fleet) / fleet.clients_per_round, device=fleet.device)}
        return ServerState(round=0, weights=weights, extra={"history": history, "buffers": buffers, "turns": turns})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the thresholds of the rounds since the client's last participation; it has its weights already."""
        since = view.shared.get("round", 0)
        missed = {name: rows[since:] for name, rows in server.extra["history"].items()}
        buffers = {name: server.weights[name] for name in server.extra["buffers"]}
        return Message(weights=buffers, extra={"history": missed})

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the training of the thresholds from the common ones."""
        history = message.extra["history"]
        return [UnitThresholds(self.strength, {name: rows[-1] for name, rows in history.items()}, history)]

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's weights and thresholds, and send the thresholds."""
        callbacks = self.callbacks(message, client)
        result = client.fit({**message.weights, **client.memory.get("weights", {})}, callbacks=callbacks)
        trained = next(callback for callback in callbacks if isinstance(callback, UnitThresholds))
        theta, thresholds = trained.theta, dict(trained.thresholds)
        own = {name: value for name, value in result.weights.items() if name not in message.weights}
        live = {f"live/{name}": live_share(theta[name], thresholds[name]) for name in theta}
        return Update(
            weights={name: result.weights[name] for name in message.weights},
            extra={"thresholds": thresholds},
            memory={"weights": {**own, **theta}, "thresholds": thresholds},
            metrics={**result.metrics, **live},
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Append the mean of the thresholds to those of the rounds before."""
        state, mean = super().aggregate(server, merged), merged.extra.get("thresholds", {})
        history = {
            name: torch.cat([rows, mean.get(name, rows[-1]).to(rows)[None]])
            for name, rows in server.extra["history"].items()
        }
        return replace(state, extra={**server.extra, "history": history})

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """Return the round of the client's participation, and the density of its layers."""
        live = {name.removeprefix("live/"): value for name, value in report.items() if name.startswith("live/")}
        return {"round": view.round, "live": live}

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the client's weights after the changes of the common thresholds, under its own thresholds."""
        history = message.extra["history"]
        own: Weights = client.memory.get("weights", {})
        thresholds = client.memory.get("thresholds", {name: rows[0] for name, rows in history.items()})
        weights = {**client.initial, **message.weights, **own}
        moved = {name: follow_all(weights[name], rows.to(weights[name])) for name, rows in history.items()}
        return {**weights, **_masked(moved, thresholds)}

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's weights under its thresholds."""
        memory = update.memory or {}
        weights, thresholds = memory["weights"], memory["thresholds"]
        return {**update.weights, **weights, **_masked({name: weights[name] for name in thresholds}, thresholds)}

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with thresholds that are not 0 after round 0, as many as a client misses on average."""
        count = 1 + min(round, int(server.extra["turns"]["every"]))
        history = {name: (rows + (round > 0)).repeat(count, 1) for name, rows in server.extra["history"].items()}
        return replace(server, round=round, extra={**server.extra, "history": history})

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs of the units that were on after the last participation, and of thresholds in both directions."""
        live = facts.view.shared.get("live", {})
        held = sum(2 * layer.macs * live.get(layer.weight, 1.0) + layer.bias for layer in facts.layers)
        samples = facts.epochs * facts.samples
        thresholds = BYTES_PER_WEIGHT * sum(rows.shape[1] for rows in facts.message.extra["history"].values())
        return Costs(
            flops_paper=3 * samples * held,
            flops_analytic=samples * (2 * held + forward_flops(facts.layers)),
            bytes_down_paper=thresholds,
            bytes_up_paper=thresholds,
        )


def _masked(weights: Weights, thresholds: Weights) -> dict[str, Tensor]:
    """Return weights whose units are off below their thresholds."""
    return {name: keep_rows(value, thresholds[name].to(value)) for name, value in weights.items()}
