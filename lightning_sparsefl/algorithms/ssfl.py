"""SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated Learning.

Ohib, Thapaliya, Dziugaite, Liu, Calhoun, Plis, TMLR 2026, arXiv:2405.09037.

Before the first round, every client scores each weight by ``|w * g|`` with the gradient g of one batch at the initial
weights. The server averages the scores, keeps the globally largest ones, and all rounds train under this mask.
Gradients of opposite signs, which cancel in the mean gradient of `SNIP`, add up here.

Departures from the paper and the authors' code:

- Scores are averaged with the numbers of samples as weights, as in the paper; the code that it grew out of
  (SalientGrads) does so for one of its partitions, and takes the plain mean for others.
- The number of kept weights is rounded, where the code cuts it off; it is exact, since ties are broken by the index. A
  layer keeps one weight at least; the code may leave it empty.
- The gradient is that of the module's own loss in evaluation mode; the code passes logits to `nll_loss`, in training
  mode. Means over several batches, an option of the code which the paper does not use, are not offered.
- Dropped weights have no gradient, and no part in `gradient_clip_val`, where the code clips before it masks.
- Its FLOPs are not charged; the bytes of the scores are, to the first round.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.algorithms._first_mask import start_under_mask
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import prunable
from lightning_sparsefl.sparse.parts import only, without
from lightning_sparsefl.sparse.scores import snip
from lightning_sparsefl.types import Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class SSFL(FederatedAlgorithm):
    """One global mask, computed from the clients' scores of the initial weights, under which all rounds train."""

    density: float = 0.5
    """Fraction of the weights that the mask keeps, in (0, 1]."""
    dense_layers: tuple[str, ...] = ()
    """Patterns of names of layers that are not pruned."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Ask the clients for scores of the initial weights, which they have, and prune."""
        pool = fleet.prunable(weights, self.dense_layers)
        scores = fleet.survey(Message(weights={})).weights
        return start_under_mask(weights, only(scores, pool), self.density)

    def survey(self, message: Message, client: Client) -> Update:
        """Return the scores of the weights that are pruned, by one batch at the initial weights."""
        parameters = without(client.initial, client.buffers)
        pool = only(parameters, prunable(parameters, self.dense_layers, client.uses.frozen))
        return Update(weights=snip(pool, client.gradient({})), weight=client.num_examples)
