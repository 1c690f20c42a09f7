"""FedSpa: Achieving Personalized Federated Learning with Sparse Local Models.

Huang, Liu, Shen, He, Lin, Tao; arXiv:2201.11380 (ICLR 2022 submission), and the journal version of it. Equations and
algorithms are numbered as there.

Each client k owns a mask m_k, the server owns one dense w. A client receives m_k * w, trains under its mask (eq. 3),
sends the change, and searches a better mask by dropping small weights and growing those with large gradients
(Algorithm 2, DST), or keeps it (Algorithm 3, RSM). The server adds the plain mean of the changes (eq. 4).

Departures. The authors published no code; the layer densities, the cost formulas and the dense budget follow the code
of the same group's DisPFL, which reproduces FedSpa's cost tables digit for digit:

- By default only tensors of two or more dimensions are masked. The published counts put biases and norm parameters
  into the pool too: ``mask_pool="all"``.
- The exchange falls to 0 in the last round, as the paper's ``T - 1`` says, not the round after.
- Gradients are masked before clipping and before the step, as in eq. 3; the code masks weights after it, which differs
  with momentum.
- Dropped weights get an infinitely bad score, not a large constant, and a layer never loses its last weight.
- ``flops/paper`` charges the search also to ``search="static"``, as the paper's table does; ``flops/train`` does not.
- The paper leaves open which batch and mode the search gradient uses: one training batch, evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.options import check_choices
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts, maskable, uniform
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.prune import prune, random_masks
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.sparse.scores import gradient, magnitude, random
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class FedSpa(FederatedAlgorithm):
    """A sparse model per client, its mask searched by dropping and growing."""

    density: float = 0.5
    """Fraction of the maskable weights that a client keeps, in (0, 1]."""
    search: Literal["dst", "static"] = "dst"
    """Whether masks are searched (DST) or stay as drawn (RSM)."""
    mask_init: Literal["same", "different"] = "same"
    """Whether all clients start from one mask or each from its own."""
    layer_density: Literal["erk", "uniform"] = "erk"
    """How the density is spread over layers."""
    growth: Literal["gradient", "random"] = "gradient"
    """What decides which weights grow."""
    exchange: float = 0.5
    """Fraction of a layer's kept weights that the first search exchanges (alpha_0), in [0, 1]; falls by cosine."""
    merge: Literal["mean", "count"] = "mean"
    """Plain mean over the cohort (the paper), or over those who hold a coordinate."""
    mask_pool: Literal["weights", "all"] = "weights"
    """What is masked: tensors of two or more dimensions, or every parameter (the published cost tables)."""

    def __post_init__(self) -> None:
        check_choices(self, "algorithm.")
        if not 0 < self.density <= 1:
            raise InvalidOption(f"`FedSpa(density={self.density})`: expected a number in (0, 1].")
        if not 0 <= self.exchange <= 1:
            raise InvalidOption(f"`FedSpa(exchange={self.exchange})`: expected a number in [0, 1].")

    @property
    def can_be_private(self) -> bool:
        """Where all clients hold one mask, drawn by chance: a searched one follows the client's data."""
        return self.search == "static" and self.mask_init == "same"

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the common mask; it fixes every layer's budget for good."""
        parameters = {name: value for name, value in weights.items() if name not in fleet.buffers}
        names = maskable(parameters) if self.mask_pool == "weights" else tuple(parameters)
        shapes = {name: weights[name].shape for name in names}
        spread = erk if self.layer_density == "erk" else uniform
        counts = kept_counts(shapes, spread(shapes, self.density))
        masks = random_masks(shapes, counts, generator(fleet.seed, "FedSpa mask"))
        return ServerState(round=0, weights=weights, extra={"first_masks": _on(fleet.device, masks)})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """m_k * w, and the mask where the client lacks it."""
        masks = self.masks(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def masks(self, server: ServerState, view: ClientView | Client) -> Masks:
        """The mask a client uploaded last, or the one it starts from."""
        if "masks" in view.shared:
            return dict(view.shared["masks"])
        first = server.extra["first_masks"]
        if self.mask_init == "same":
            return first
        counts = {name: int(mask.sum()) for name, mask in first.items()}
        shapes = {name: mask.shape for name, mask in first.items()}
        drawn = random_masks(shapes, counts, generator(view.seed, view.id, "FedSpa mask"))
        return _on(next(iter(first.values())).device, drawn)

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, then search the next one (Algorithms 1 and 2)."""
        result = client.fit(message.weights, message.masks, callbacks=self.callbacks(message, client))
        shared = {"masks": self._search(result.weights, message.masks, client)} if self.search == "dst" else None
        return Update(
            weights=subtract(result.weights, message.weights),
            kind="difference",
            shared=shared,
            metrics=result.metrics,
        )

    def _search(self, trained: Weights, masks: Masks, client: Client) -> Masks:
        """Drop the smallest weights of each layer, then grow as many where the gradient is largest."""
        rate = cosine(self.exchange, client.round, client.max_rounds)
        if rate == 0:
            return masks
        weights = {name: trained[name] for name in masks}
        kept = prune(magnitude(weights), masks, rate)
        if self.growth == "gradient":
            scores = gradient({name: g for name, g in client.gradient(trained).items() if name in masks})
        else:
            scores = _on(next(iter(masks.values())).device, random(weights, client.rng("growth")))
        return regrow(scores, kept, {name: int(mask.sum()) for name, mask in masks.items()})

    def reducer(self) -> Reducer:
        """Eq. 4 divides by the cohort, not by those who hold a coordinate."""
        return PlainMean() if self.merge == "mean" else CoverageMean()

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """m_k * w, before local training."""
        return apply(server.weights, self.masks(server, client))

    def costs(self, facts: CostFacts) -> Costs:
        """``E * n_k * 3 * F_sparse``, plus a dense pass over the batch of the search."""
        costs, dense = super().costs(facts), 3 * forward_flops(facts.layers)
        searches = self.search == "dst" and self.growth == "gradient" and self.exchange > 0
        return replace(
            costs,
            flops_paper=costs.flops_paper + facts.batch_size * dense,
            flops_analytic=costs.flops_analytic + searches * min(facts.batch_size, facts.samples) * dense,
        )


def _on(device: torch.device, tree: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tree on a device; masks are drawn on the CPU so that every machine draws the same."""
    return {name: tensor.to(device) for name, tensor in tree.items()}
