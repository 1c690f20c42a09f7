"""FedPM: Sparse Random Networks for Communication-Efficient Federated Learning.

Isik, Pase, Gunduz, Weissman, Zorzi, ICLR 2023, arXiv:2209.15328, section 3 and Algorithm 1.

Weights and biases of linear and convolutional layers are signs times a constant and never change. Every number has a
score, whose sigmoid is the probability that it is kept. The server sends the scores, clients train them under masks
that are drawn in every step, and each sends one draw from its own, a bit for every number. The server takes the
frequencies of these bits as the new probabilities.

Departures from the authors' code:

- The optimizer of the scores starts anew in every round; in the code a client keeps its state. The paper uses Adam with
  a learning rate of 0.1 and no weight decay, which the module sets.
- A mask is drawn for each optimizer step, not for each batch of accumulated gradients.
- The model that is scored has the numbers whose probability is above one half; the paper averages three draws.
- Parameters of other layers, such as norms, are trained, sent and averaged as by FedAvg with equal weights of the
  clients; the paper's networks have none.
- Layers whose weight spectral norm computes are trained like norms; those with weight norm are refused.
- The upload is one bit for every number; the paper also counts its entropy, which an arithmetic coder would reach.
- A client keeps its trained model in its memory, for scores right after training only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import require_maskable
from lightning_sparsefl.callbacks.stochastic_mask import StochasticMask
from lightning_sparsefl.cost import BYTES_PER_WEIGHT
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import derive_seed, generator
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.supermask import (
    fan_ins,
    posterior_scores,
    signed_constant,
    signed_constants,
    supermasked,
)
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
class FedPM(FederatedAlgorithm):
    """Clients train the probabilities with which fixed random weights are kept, and send one mask."""

    least: float = 0.01
    """Smallest probability that the server gives a weight, in (0, 0.5); the largest is 1 minus it."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.least < 0.5, "algorithm.least", self.least, "a number in (0, 0.5)")

    def adapt(self, module: LightningModule) -> None:
        """Replace the weights and biases of linear and convolutional layers that train by signed constants.

        Raises:
            InvalidOption: If the module has no such layer, or a weight has a parametrization that changes zeros.
        """
        for path, layer in supermasked(module):
            trained = [name for name, value in layer.named_parameters(prefix=path) if value.requires_grad]
            require_maskable(module, trained, "algorithm", by_layers=False)
        found = [each for each in fan_ins(module) if each[1].requires_grad]
        if not found:
            raise InvalidOption(
                f"`algorithm` is FedPM, which masks linear and convolutional layers, but `{type(module).__name__}` has "
                "none that train; expected a module with some."
            )
        with torch.no_grad():
            for _, parameter, fan_in in found:
                parameter.copy_(signed_constant(parameter, fan_in))

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the first scores of the signed constants."""
        names = signed_constants({name: value for name, value in weights.items() if name not in fleet.buffers})
        if not names:
            raise InvalidOption(
                "FedPM finds no signed constants among the first weights; expected those of a module after "
                "`algorithm.adapt(module)`."
            )
        rng, frozen = generator(fleet.seed, "FedPM scores"), {name: weights[name] for name in names}
        drawn = {n: torch.randn(w.shape, generator=rng, dtype=torch.float32) for n, w in frozen.items()}
        scores = {name: values.to(weights[name]) for name, values in drawn.items()}
        return _with_scores(ServerState(round=0, weights=weights, extra={"frozen": frozen}), scores)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the scores, and what is not masked."""
        scores = server.extra["scores"]
        others = {name: value for name, value in server.weights.items() if name not in scores}
        return Message(weights=others, extra={"scores": scores})

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the weights whose probability is above one half."""
        return Message(weights=server.weights, masks=_likely(server.extra["scores"]))

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the training of the scores."""
        return [StochasticMask(derive_seed(*client.key("masks")), message.extra["scores"])]

    def train(self, message: Message, client: Client) -> Update:
        """Train the scores, and send a draw from them."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)
        trained = next(callback for callback in callbacks if isinstance(callback, StochasticMask))
        rng = client.rng("bits")
        bits = {name: _drawn(values, rng) for name, values in trained.scores.items()}
        own = apply(trained.frozen, _likely({name: trained.scores[name] for name in trained.frozen}))
        return Update(
            weights={name: result.weights[name] for name in message.weights},
            extra={"bits": bits},
            memory={"trained": own},
            metrics=result.metrics,
        )

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Set the probabilities to the frequencies of the bits."""
        state, frequencies = super().aggregate(server, merged), merged.extra.get("bits", {})
        scores = {
            name: posterior_scores(frequencies[name].to(old), self.least) if name in frequencies else old
            for name, old in server.extra["scores"].items()
        }
        return _with_scores(state, scores)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the weights whose probability is above one half after training."""
        own: Weights = (update.memory or {})["trained"]
        return {**update.weights, **own}

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with 4 bytes a score in downloads and a bit a score in uploads, and dense passes."""
        costs = super().costs(facts)
        total = sum(value.numel() for value in facts.message.extra["scores"].values())
        return replace(
            costs,
            bytes_down_paper=costs.bytes_down_paper + BYTES_PER_WEIGHT * total,
            bytes_up_paper=costs.bytes_up_paper + math.ceil(total / 8),
        )


def _likely(scores: Weights) -> Masks:
    """Return masks of the weights whose probability is above one half."""
    return {name: value > 0 for name, value in scores.items()}


def _drawn(scores: Tensor, rng: torch.Generator) -> Tensor:
    return (torch.rand(scores.shape, generator=rng, dtype=scores.dtype) < scores.sigmoid().cpu()).to(scores.device)


def _with_scores(server: ServerState, scores: Mapping[str, Tensor]) -> ServerState:
    weights = {**server.weights, **apply(server.extra["frozen"], _likely(scores))}
    return replace(server, weights=weights, extra={**server.extra, "scores": scores})
