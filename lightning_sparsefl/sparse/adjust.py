"""Exchange of weights of a mask.

The smallest are dropped and as many others added (FedTiny, arXiv:2212.01977), or masks are drawn (FedRTS,
arXiv:2501.19122).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Beta

from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.types import Masks, Weights


def exchanged(masks: Masks, rate: float) -> dict[str, int]:
    """Return the number of weights that each mask exchanges: ``floor(rate * kept)``, at most the dead ones.

    Args:
        masks: Masks of what is kept.
        rate: Fraction of the kept weights, in [0, 1].

    Example:
        >>> exchanged({"a": torch.tensor([True] * 5 + [False] * 5), "b": torch.tensor([True, True, False])}, 0.9)
        {'a': 4, 'b': 1}
    """
    return {name: min(floor_count(rate, kept), masks[name].numel() - kept) for name, kept in counts(masks).items()}


def adjusted(
    scores: Weights, growth: Weights, masks: Masks, numbers: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Drop the smallest scores of each mask, then add as many positions with the largest growth.

    Args:
        scores: Scores of the kept weights, such as their magnitudes; others are ignored.
        growth: Scores of the other positions, those just dropped included.
        masks: Masks of what is kept now.
        numbers: Number of weights that each mask exchanges.

    Returns:
        The masks after dropping, and after adding.

    Example:
        >>> masks = {"w": torch.tensor([True, True, False, False])}
        >>> scores, growth = {"w": torch.tensor([1.0, 2.0, 0.0, 0.0])}, {"w": torch.tensor([0.0, 0.0, 1.0, 3.0])}
        >>> adjusted(scores, growth, masks, {"w": 1})[1]
        {'w': tensor([False,  True, False,  True])}
    """
    goals = counts(masks)
    kept = shrink(scores, masks, {name: goal - numbers[name] for name, goal in goals.items()})
    return kept, regrow(growth, kept, goals)


def beta_draws(alpha: Weights, beta: Weights, seed: int) -> dict[str, Tensor]:
    """Draw from beta distributions, on the CPU in float64, so that draws are equal on every device.

    Args:
        alpha: First parameters by name.
        beta: Second parameters, same shapes.
        seed: Random seed of the draws.

    Example:
        >>> sure = beta_draws({"w": torch.tensor([1e6, 1.0])}, {"w": torch.tensor([1.0, 1e6])}, 0)["w"]
        >>> sure.round().tolist()
        [1.0, 0.0]
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds other devices too, for good
        drawn = {name: Beta(a.cpu().double(), beta[name].cpu().double()).sample() for name, a in alpha.items()}
    return {name: draw.to(alpha[name].device) for name, draw in drawn.items()}
