"""FLASC: Federated LoRA with Sparse Communication.

Kuo, Raje, Rajesh, Smith, arXiv:2406.05233, section 3 and Algorithm 1.

Only adapters and the head are trained; the other weights stay at the run's initial values, and no client that trains
receives or sends them. The server sends the adapters' largest weights and zeros for the others, a client trains all of
them, and sends its largest changes. The server makes a step of AdamW of the mean change, in which what was not sent
counts as no change.

Departures from the authors' code:

- The names of the adapters come from the user's module, whose layers they are; `adapters` are patterns of names.
- What is not trained is frozen also where the module does not do so.
- The head is exchanged whole. With ``adapters=["*lora*", "head"], whole=[]`` its weights are chosen among as well.
- Clients are scored under the mask of the last round's downloads, as in the code, and receive the whole model for it;
  ``global/*`` are the scores of all weights.
- With `frozen`, matrices of adapters stay as they are (FFA-LoRA, arXiv:2403.12313). Clients with densities of their own
  are not offered.
- AdamW also moves weights on which no client has voted, by its mean of earlier changes, as in the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import BYTES_PER_WEIGHT, training_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.aggregation.server_optimizer import ServerOptimizer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import apply, dense_like, subtract
from lightning_sparsefl.sparse.parts import only, part
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.sparse.uses import TensorUses
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
class FLASC(FederatedAlgorithm):
    """Training of adapters, of which the largest weights are sent and the largest changes returned."""

    has_server_optimizer = True

    down_density: float = 0.25
    """Fraction of the adapters' weights that the server sends, in (0, 1]."""
    up_density: float = 0.25
    """Fraction of the adapters' changes that a client sends, in (0, 1]."""
    adapters: tuple[str, ...] = ("*lora*",)
    """Modules, or patterns of names of tensors, whose weights are chosen from; ``head`` is the last linear layer."""
    whole: tuple[str, ...] = ("head",)
    """Modules and patterns of what is trained beside the adapters, and sent whole."""
    frozen: tuple[str, ...] = ()
    """Modules and patterns of what stays as it is although `adapters` or `whole` match it."""
    server_lr: float = 1e-3
    """Learning rate of the server's AdamW, above 0."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("down_density", "up_density"):
            value = getattr(self, name)
            require(0 < value <= 1, f"algorithm.{name}", value, "a number in (0, 1]")
        require(self.server_lr > 0, "algorithm.server_lr", self.server_lr, "a number above 0")

    @property
    def optimizer(self) -> ServerOptimizer:
        """Optimizer of the server."""
        return ServerOptimizer(rule="adamw", lr=self.server_lr)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the adapters and what is frozen.

        Raises:
            InvalidOption: If the module has no adapters of these names.
        """
        parameters = {name: value for name, value in weights.items() if name not in fleet.buffers}
        uses = fleet.uses
        frozen = set(part(parameters, self.frozen, uses=uses, option="algorithm.frozen"))
        adapters = [name for name in self._adapters(parameters, uses) if name not in frozen]
        trained = {*adapters, *self._whole(parameters, uses)} - frozen - uses.frozen
        extra: dict[str, Weights] = {
            "masks": self._largest(only(parameters, adapters), self.down_density),
            "trainable": {n: torch.zeros_like(w, dtype=torch.bool) for n, w in parameters.items() if n not in trained},
            **self.optimizer.first(only(parameters, trained)),
        }
        return ServerState(round=0, weights=weights, extra=extra)

    def _whole(self, parameters: Weights, uses: TensorUses) -> tuple[str, ...]:
        try:
            return part(parameters, self.whole, uses=uses, option="algorithm.whole")
        except InvalidOption as error:
            raise InvalidOption(f"{error} To train adapters alone, set `algorithm.whole` to [].") from error

    def _adapters(self, parameters: Weights, uses: TensorUses) -> tuple[str, ...]:
        try:
            return part(parameters, self.adapters, uses=uses, option="algorithm.adapters")
        except InvalidOption as error:
            raise InvalidOption(
                f"`algorithm.adapters` is {self.adapters!r}, but the module has no such tensors: expected names of "
                f"adapters that the module has, such as those of LoRA. {error}"
            ) from error

    def _largest(self, weights: Weights, density: float) -> Masks:
        count = max(1, floor_count(density, sum(value.numel() for value in weights.values())))
        return shrink_globally(magnitude(weights), dense_like(weights), count)

    def _sent(self, server: ServerState, masks: Masks) -> Message:
        """Return a message with the weights that are trained, and with buffers."""
        frozen = server.extra["trainable"]
        weights = {name: value for name, value in server.weights.items() if name not in frozen}
        return Message(weights=apply(weights, masks), masks=masks, trainable=frozen)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the adapters' largest weights, and what is sent whole."""
        return self._sent(server, self._masks(server))

    def _masks(self, server: ServerState) -> Masks:
        return self._largest(only(server.weights, server.extra["masks"]), self.down_density)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the whole model under the mask of the last round's downloads."""
        masks = server.extra["masks"]
        return Message(weights=apply(server.weights, masks), masks=masks, trainable=server.extra["trainable"])

    def train(self, message: Message, client: Client) -> Update:
        """Train all adapters and what is sent whole, and send the largest changes."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, trainable=message.trainable, callbacks=callbacks)
        changes = subtract(only(result.weights, message.weights), message.weights)
        votes = self._largest(only(changes, message.masks), self.up_density)
        return Update(weights=changes, kind="difference", votes=votes, metrics=result.metrics)

    def finetune_for(self, message: Message, client: Client, epochs: int) -> Weights:
        """Train all adapters and what is sent whole, as in a round."""
        callbacks = self.callbacks(message, client)
        return client.fit(message.weights, trainable=message.trainable, callbacks=callbacks, epochs=epochs).weights

    def may_vote(self, message: Message) -> Masks:
        """Return where weights are trained, whether they were sent or not."""
        return message.trainable

    def reducer(self) -> Reducer:
        """Return the mean in which changes that were not sent count as zero."""
        return PlainMean()

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Take a step of AdamW instead of the mean change."""
        before = {key: server.extra[key] for key in ("m", "v")}
        merged, moments = self.optimizer.step(server, replace(merged, covered={}), before)
        extra = {**server.extra, **moments, "masks": self._masks(server)}
        return replace(super().aggregate(server, merged), extra=extra)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs of what travels, and of training that stops below the first trained layer."""
        costs, message = super().costs(facts), facts.message
        flops = training_flops(facts.layers, {}, message.trainable, facts.epochs * facts.samples)
        sizes = {name: value.numel() for name, value in message.weights.items() if name not in facts.buffers}
        pool = sum(sizes[name] for name in message.masks)
        up = sum(sizes.values()) - pool + max(1, floor_count(self.up_density, pool))
        return replace(costs, flops_paper=flops, flops_analytic=flops, bytes_up_paper=BYTES_PER_WEIGHT * up)
