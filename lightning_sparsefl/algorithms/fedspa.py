"""FedSpa: Achieving Personalized Federated Learning with Sparse Local Models.

Huang, Liu, Shen, He, Lin, Tao; arXiv:2201.11380 (ICLR 2022 submission), and its journal version. Equations and
algorithms are numbered as in the paper.

Each client k has a mask m_k, and the server has dense weights w. A client receives m_k * w, trains under its mask
(eq. 3), sends the change of the weights, and searches for a better mask by dropping small weights and growing those
with large gradients (Algorithm 2, DST), or keeps its mask (Algorithm 3, RSM). The server adds the plain mean of the
changes (eq. 4).

Departures from the paper, whose authors published no code. The layer densities, the cost formulas and the dense budget
follow the code of DisPFL by the same group, which reproduces FedSpa's cost tables exactly:

- By default only tensors of two or more dimensions are masked. The published counts also include biases and norm
  parameters: ``mask_pool="all"``.
- The exchange falls to 0 in the last round, as ``T - 1`` in the paper says, not in the round after it.
- Gradients are masked before clipping and before the step, as in eq. 3; the code masks weights after the step, which is
  different with momentum.
- Dropped weights get an infinite score instead of a large constant, and a layer never loses its last weight.
- ``flops/paper`` includes the search also for ``search="static"``, as the paper's table does; ``flops/train`` does not.
- The paper does not specify the batch and the mode of the search gradient; here it is one training batch, augmented as
  such, in evaluation mode.
- Gradients are not clipped unless `trainer.gradient_clip_val` is set. The paper does not mention clipping; the code of
  DisPFL clips to a norm of 10.

The rows called FedSpa in the tables of FedLPS (arXiv:2412.07216) are of another method, which is not implemented: its
clients train dense until their validation accuracy exceeds .5, and from then on prune by magnitude before they train,
each time they take part, and let as many positions return as the density allows, those with the largest gradients,
whether they were held or not. The cells of these tables run FedSpa.

With ``merge="count"`` and all clients in each round it computes what :class:`~lightning_sparsefl.DisPFL` does on the
full graph, except that a weight that no client holds keeps its value instead of becoming 0, and that the exchange falls
to 0 one round earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sparsefl.algorithms._mask_search import (
    Growth,
    LayerDensity,
    MaskInit,
    MaskPool,
    layer_counts,
    masked_shapes,
    own_masks,
    searched,
    with_search,
)
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.schedule import cosine
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
    """A sparse model for each client, whose mask is searched by dropping and growing weights."""

    density: float = 0.5
    """Fraction of the maskable weights that a client keeps, in (0, 1]."""
    search: Literal["dst", "static"] = "dst"
    """Whether masks are searched (DST) or keep their random initial values (RSM)."""
    mask_init: MaskInit = "same"
    """Whether all clients start from the same mask or from different ones."""
    layer_density: LayerDensity = "erk"
    """Distribution of the density over layers."""
    growth: Growth = "gradient"
    """Criterion for growing weights."""
    exchange: float = 0.5
    """Fraction of a layer's kept weights that the first search exchanges (alpha_0), in [0, 1]; it falls by a cosine."""
    merge: Literal["mean", "count"] = "mean"
    """Mean of each coordinate over the cohort (the paper), or over the clients whose masks keep it."""
    mask_pool: MaskPool = "weights"
    """Masked tensors: those of two or more dimensions, or every parameter (the published cost tables)."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        require(0 <= self.exchange <= 1, "algorithm.exchange", self.exchange, "a number in [0, 1]")

    @property
    def uploads_shared(self) -> bool:  # type: ignore[override]
        """Whether clients search masks, which they then upload."""
        return self.search == "dst"

    @property
    def can_be_private(self) -> bool:
        """Whether all clients have the same random mask; a searched mask depends on the client's data."""
        return self.search == "static" and self.mask_init == "same"

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the common mask, which determines the number of weights of every layer for the whole run."""
        shapes = masked_shapes(weights, fleet, self.mask_pool)
        masks = fleet.random_masks(shapes, layer_counts(shapes, self.density, self.layer_density), "FedSpa mask")
        return ServerState(round=0, weights=weights, extra={"first_masks": masks})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send m_k * w, and the mask if the client does not have it."""
        masks = self.masks(server, view)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def masks(self, server: ServerState, view: ClientView) -> Masks:
        """Return the mask that a client uploaded last, or its first one.

        Args:
            server: State of the server.
            view: View of the client.
        """
        return own_masks(server.extra["first_masks"], view, self.mask_init, "FedSpa mask")

    @property
    def follows_length(self) -> bool:  # type: ignore[override]
        """Whether masks are searched at a rate that decays over the rounds of the run."""
        return self.search == "dst" and self.exchange > 0

    def train(self, message: Message, client: Client) -> Update:
        """Train under the mask, then search for the next one (Algorithms 1 and 2)."""
        result = client.fit(message.weights, message.masks, callbacks=self.callbacks(message, client))
        rate = cosine(self.exchange, client.round, client.max_rounds)
        searches = self.search == "dst"
        masks = searched(result.weights, message.masks, rate, self.growth, client) if searches else None
        return Update(
            weights=subtract(result.weights, message.weights),
            kind="difference",
            shared={"masks": masks} if searches else None,
            metrics=result.metrics,
        )

    def reducer(self) -> Reducer:
        """Return the mean over the cohort (eq. 4), or over the clients whose masks keep a coordinate."""
        return PlainMean() if self.merge == "mean" else CoverageMean()

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs with ``E * n_k * 3 * F_sparse`` FLOPs and a dense pass over the batch of the search."""
        rate = cosine(self.exchange, facts.view.round, facts.view.max_rounds)
        by_gradient = self.search == "dst" and self.growth == "gradient" and rate > 0
        return with_search(super().costs(facts), facts, by_gradient)
