"""One mask of the globally largest scores, made before the first round (SNIP, SSFL)."""

from __future__ import annotations

from lightning_sparsefl.errors import require
from lightning_sparsefl.sparse.masks import apply, dense_like
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.types import ServerState, Weights


def start_under_mask(weights: Weights, scores: Weights, density: float) -> ServerState:
    """Return the state before the first round, with a mask of the largest scores of all layers together.

    Args:
        weights: Initial weights.
        scores: Scores of the weights that are pruned; of equal scores that of the lower index is kept.
        density: Fraction of the scored weights to keep; a layer keeps one weight at least.

    Raises:
        InvalidOption: If fewer weights than layers would be kept.
    """
    count = round(density * sum(score.numel() for score in scores.values()))
    expected = f"a density that leaves each of the {len(scores)} layers a weight"
    require(count >= len(scores), "algorithm.density", density, expected)
    masks = shrink_globally(scores, dense_like(scores), count, least=1)
    return ServerState(round=0, weights=apply(weights, masks), masks=masks)
