"""SparsyFed: Sparse Adaptive Federated Training.

Guastella, Sani, Iacob, Mora, Bellavista, Lane, ICLR 2025, arXiv:2504.05153, section 3 and Algorithm 1.

Clients train theta, where the model has ``sign(theta) * |theta| ** b`` (powerpropagation): the gradient of a weight of
0 is 0, so that dead weights stay dead and the masks of clients agree. After training, a client keeps the largest theta
of all layers together. The server averages the sparse models, zeros included, and prunes nothing itself, so that the
density of its model may be above that of the clients.

Departures from the paper and the authors' code:

- The first theta is the root of the first weights, so that the model starts as any other.
- A figure of the authors prunes the update before an adaptive server step; their program prunes the trained weights and
  averages them, as here. With `federation.server_optimizer`, the server makes an adaptive step of theta, which does not
  reach 0 where all clients drop a theta: the model becomes denser than theirs, and dense with Adam.
- With `prune_activations` the largest inputs are chosen in every batch; the code reuses the threshold of the first
  sparse batch of a convolution.
- The exponent -1 of the code, which takes the spectral norm of a layer for it, is not offered.
- Biases and norms are never pruned, and weight decay acts on theta.
- A client sends theta wherever it received one, zeros for those that it drops; the paper's bytes leave these out. With
  exponent 1, where dead weights may return, uploads are dense.
- With `federation.clip_update`, the change of a theta that a client drops is scaled down as all others, so that it is
  not 0 after the merge: clients with longer updates than that keep the model dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.callbacks import PowerPropagation
from lightning_sparsefl.callbacks.sparse_inputs import SparseInputs
from lightning_sparsefl.cost import BYTES_PER_WEIGHT
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import apply, dense_like
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.reparameterize import power, root
from lightning_sparsefl.sparse.scores import magnitude
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
class SparsyFed(FederatedAlgorithm):
    """Clients train powers of weights and send the largest ones."""

    density: float = 0.05
    """Fraction of the maskable weights that a client keeps after training (rho), in (0, 1]."""
    exponent: float = 1.25
    """Exponent of the weights (b), >= 1; 1 trains the weights themselves, dead ones included."""
    prune_activations: bool = True
    """Whether a layer's weight gradients come from the largest of its inputs, at the density of its weights."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(self.exponent >= 1, "algorithm.exponent", self.exponent, "a number >= 1")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Set the first theta to the roots of the maskable weights."""
        names = fleet.maskable(weights)
        theta = {name: root(weights[name], self.exponent) for name in names}
        return ServerState(round=0, weights={**weights, **self._shown(theta)}, extra={"theta": theta})

    def _shown(self, theta: Weights) -> dict[str, Tensor]:
        return {name: power(value, self.exponent) for name, value in theta.items()}

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send theta, and where it is not 0."""
        return Message(weights=self.weights_to_step(server), masks=_support(server.extra["theta"]))

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the model."""
        return Message(weights=server.weights, masks=_support(server.extra["theta"]))

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return the training of theta, and the pruning of inputs."""
        theta = {name: message.weights[name] for name in message.masks}
        inputs: list[Callback] = [SparseInputs()] if self.prune_activations else []
        return [*inputs, PowerPropagation(self.exponent, theta=theta)]

    def train(self, message: Message, client: Client) -> Update:
        """Train theta, and send its largest values."""
        callbacks = self.callbacks(message, client)
        result = client.fit(message.weights, callbacks=callbacks)  # theta of 0 may only return with exponent 1
        theta = next(each.theta for each in callbacks if isinstance(each, PowerPropagation))
        return Update(
            weights={**result.weights, **apply(theta, self._largest(theta))},
            weight=client.num_examples,
            votes=self.may_vote(message),
            metrics=result.metrics,
        )

    def _largest(self, theta: Weights) -> Masks:
        return shrink_globally(magnitude(theta), dense_like(theta), self._count(theta))

    def _count(self, theta: Weights) -> int:
        return max(1, round(self.density * sum(value.numel() for value in theta.values())))

    def may_vote(self, message: Message) -> Masks:
        """Return where theta is not 0, since it stays 0 elsewhere; with exponent 1 any weight may return."""
        return {} if self.exponent == 1 else message.masks

    def weights_to_step(self, server: ServerState) -> Weights:
        """Return theta, biases and norms."""
        return {**server.weights, **server.extra["theta"]}

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Merge theta, and compute the model."""
        mean = super().aggregate(replace(server, weights=self.weights_to_step(server)), merged)
        return self._with_theta(mean, {name: mean.weights[name] for name in server.extra["theta"]})

    def _with_theta(self, server: ServerState, theta: Weights) -> ServerState:
        weights, extra = {**server.weights, **self._shown(theta)}, {**server.extra, "theta": theta}
        return replace(server, weights=weights, extra=extra)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's sparse model."""
        weights = update.weights
        return {**weights, **self._shown({name: weights[name] for name in message.masks})}

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return the state after a round whose clients all kept the same weights, the least that is sent."""
        theta = server.extra["theta"]
        kept = apply(theta, self._largest(theta)) if round else theta
        return replace(self._with_theta(server, kept), round=round)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with uploads of the weights that are kept, and of biases and norms."""
        message = facts.message
        theta = {name: message.weights[name] for name in message.masks}
        others = {n: w for n, w in message.weights.items() if n not in theta and n not in facts.buffers}
        sent = self._count(theta) + sum(value.numel() for value in others.values())
        costs = replace(super().costs(facts), bytes_up_paper=BYTES_PER_WEIGHT * sent)
        if self.exponent > 1:
            return costs
        dense = super().costs(replace(facts, message=replace(message, masks={})))  # weights of 0 train too
        return replace(costs, flops_paper=dense.flops_paper, flops_analytic=dense.flops_analytic)


def _support(theta: Weights) -> Masks:
    return {name: value != 0 for name, value in theta.items()}
