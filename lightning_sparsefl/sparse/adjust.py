"""Exchange of weights of a mask.

The smallest are dropped and as many others added, in the same layer (FedTiny, arXiv:2212.01977) or in any (FLASH,
arXiv:2208.13092), or masks are drawn (FedRTS, arXiv:2501.19122).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Beta

from lightning_sparsefl.sparse.density import ceil_count, floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.regrow import growth_counts, regrow
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks, Weights

_ALMOST_DENSE = 0.2
"""Sparsity below which a layer with larger weights than the mean layer drops no more than this sparsity."""


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


def reallocated(weights: Weights, masks: Masks, rate: float, growth: Weights) -> dict[str, Tensor]:
    """Drop a share of each mask's weights, then add as many in all, most where the kept weights are large on average.

    A layer drops ``ceil(rate * kept)`` of its smallest weights and keeps one at least. One that lacks less than a fifth
    of its weights, and whose mean magnitude is above that of the mean layer, drops no more than the fraction that it
    lacks (Babakniya et al., arXiv:2208.13092, and the authors' code).

    Args:
        weights: Weights, zero where the masks drop; a layer with values that are not finite counts as one of zeros.
        masks: Masks of what is kept now, of at least one weight each.
        rate: Fraction of the kept weights to drop, in [0, 1).
        growth: Scores of the positions to add; those that were just dropped may return.

    Example:
        >>> weights = {"a": torch.tensor([4.0, 4.0, 0.0, 0.0, 0.0]), "b": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])}
        >>> masks = {name: weight != 0 for name, weight in weights.items()}
        >>> new = reallocated(weights, masks, 0.5, {name: torch.arange(5.0) for name in masks})
        >>> {name: mask.int().tolist() for name, mask in new.items()}
        {'a': [1, 0, 0, 1, 1], 'b': [1, 0, 0, 0, 0]}
    """
    held = counts(masks)
    means = {name: float(weights[name].double().abs().sum()) / held[name] for name in masks}
    worth = {name: value if math.isfinite(value) else 0.0 for name, value in means.items()}
    mean, left = sum(worth.values()) / len(worth), {}
    for name, mask in masks.items():
        sparsity = 1 - held[name] / mask.numel()
        spared = sparsity < _ALMOST_DENSE and worth[name] > mean
        left[name] = max(1, held[name] - ceil_count(min(sparsity, rate) if spared else rate, held[name]))
    room = {name: mask.numel() - left[name] for name, mask in masks.items()}
    grown = growth_counts(sum(held.values()) - sum(left.values()), worth, room)
    kept = shrink(magnitude({name: weights[name] for name in masks}), masks, left)
    return regrow(growth, kept, {name: left[name] + grown[name] for name in masks})


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
