"""One mask of the globally largest scores, made before the first round (SNIP, SSFL)."""

from __future__ import annotations

from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.sparse.masks import apply, dense_like
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.types import ServerState, Weights


def require_scores(scores: Weights) -> None:
    """Refuse scores that are all 0, among which a mask would keep whatever comes first.

    Args:
        scores: Scores by name, products of weights and gradients.

    Raises:
        InvalidOption: If no score is above 0.
    """
    if not any(bool(score.any()) for score in scores.values()):
        raise InvalidOption(
            "Each initial weight that could be pruned is 0 or has a gradient of 0, so that no score tells them apart; "
            "expected a `model` without a layer of zeros that stops all gradients, such as the last one of "
            "torchvision's `VisionTransformer`, or another first mask."
        )


def start_under_mask(weights: Weights, scores: Weights, density: float) -> ServerState:
    """Return the state before the first round, with a mask of the largest scores of all layers together.

    Args:
        weights: Initial weights.
        scores: Scores of the weights that are pruned; of equal scores that of the lower index is kept.
        density: Fraction of the scored weights to keep; a layer keeps one weight at least.

    Raises:
        InvalidOption: If fewer weights than layers would be kept, or all scores are 0.
    """
    require_scores(scores)
    count = round(density * sum(score.numel() for score in scores.values()))
    expected = f"a density that leaves each of the {len(scores)} layers a weight"
    require(count >= len(scores), "algorithm.density", density, expected)
    masks = shrink_globally(scores, dense_like(scores), count, least=1)
    return ServerState(round=0, weights=apply(weights, masks), masks=masks)
