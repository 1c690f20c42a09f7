"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, arXiv:1910.06378, Algorithm 1 with option II.

Each client keeps an estimate of its gradient, a control variate, and the server keeps their mean. Clients add the
server's and subtract their own at every step, so that they move as if each saw all data. Both control variates travel,
which doubles the bytes of FedAvg.

Departures from the paper:

- The paper divides a client's change by the number of steps times the learning rate. Here it is divided by the sum of
  the coefficients of the gradients, which is the same without momentum. With momentum and schedules the new control
  variate is then the weighted mean of the fit's gradients. Weight decay counts as a part of the loss.
- With an optimizer other than SGD, and with clipped gradients, this is not exact; a message says so once.
- Only option II is offered: option I takes one more pass over the data for the gradient at the server's weights.
- The control variates are of parameters alone; buffers are averaged as in FedAvg.
- A client without a step sends nothing and keeps its control variate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GradientOffset, StepMeter
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import subtract
from lightning_sparsefl.sparse.moments import wide
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Merged, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(FederatedAlgorithm):
    """FedAvg whose clients correct their gradients by control variates."""

    lr: float = 1.0
    """Learning rate of the server, above 0: factor of the mean change."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.lr > 0, "algorithm.lr", self.lr, "a number above 0")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights, control variates of 0, and the number of clients."""
        control = {name: torch.zeros_like(value) for name, value in weights.items() if name not in fleet.buffers}
        number = torch.tensor(float(len(fleet)), device=fleet.device)
        return ServerState(round=0, weights=weights, extra={"control": control, "fleet": {"clients": number}})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the weights and the server's control variate."""
        return Message(weights=server.weights, extra={"control": server.extra["control"]})

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the weights alone."""
        return Message(weights=server.weights)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the correction of the gradients, and the meter of the steps."""
        control, own = message.extra["control"], client.memory.get("control")
        offset = GradientOffset(control if own is None else subtract(control, own))
        return [offset, StepMeter(mu=0, mean_gradient=True, owner="SCAFFOLD")]

    def train(self, message: Message, client: Client) -> Update:
        """Train with corrected gradients, and send the changes of the weights and of the control variate."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)
        offset = next(callback for callback in callbacks if isinstance(callback, GradientOffset))
        meter = next(callback for callback in callbacks if isinstance(callback, StepMeter))
        if not meter.path:
            return Update(weights={}, metrics=result.metrics)
        moved, path = subtract(result.weights, message.weights), meter.path
        # c_k' - c_k = (w - w_k) / path - c, and the offset is c - c_k
        change = {name: -moved[name] / path - control for name, control in message.extra["control"].items()}
        new = {name: value + message.extra["control"][name] - offset.offset[name] for name, value in change.items()}
        return Update(
            weights=moved,
            kind="difference",
            extra={"control": change},
            memory={"control": new},
            metrics=result.metrics,
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Add the mean changes; those of control variates by the share of the fleet that took part."""
        control, clients = server.extra["control"], float(server.extra["fleet"]["clients"])
        moved = {name: self.lr * value if name in control else value for name, value in merged.weights.items()}
        state = super().aggregate(server, replace(merged, weights=moved))
        share, change = len(merged.reports) / clients, merged.extra.get("control", {})
        new = {name: value + share * change[name] if name in change else value for name, value in control.items()}
        return replace(state, extra={**server.extra, "control": new})

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state with control variates that are not 0 after the first round, so that they have a size."""
        control = {name: wide(value) + 1 if round else value for name, value in server.extra["control"].items()}
        return replace(server, round=round, extra={**server.extra, "control": control})

    def costs(self, facts: CostFacts) -> Costs:
        """Return FedAvg's costs with twice its bytes."""
        costs = super().costs(facts)
        return replace(costs, bytes_down_paper=2 * costs.bytes_down_paper, bytes_up_paper=2 * costs.bytes_up_paper)
