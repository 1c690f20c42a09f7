"""A bandit over a continuous interval: upper confidence bounds of discounted rewards, on parts that are split.

The E-UCB of FedMP (Jiang et al., ICDE 2022, doi 10.1109/ICDE53745.2022.00062): the interval [0, 1) is the root of a
tree of parts; the leaf with the best bound is chosen, a value is drawn in it, and the leaf is split at that value. Old
rewards count less, since a federation's rewards change while it learns. The bound is that of discounted UCB (Garivier
and Moulines, "On upper-confidence bound policies for non-stationary bandit problems", arXiv:0805.3415).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch

State: TypeAlias = Mapping[str, Any]
"""A bandit: `edges` of the leaves, ascending, and the `pulls` so far as pairs of a value and its reward."""


@dataclass(frozen=True, kw_only=True)
class EUCBOptions:
    """Constants of E-UCB."""

    discount: float = 0.98
    """Factor by which a reward counts less after each later one (lambda), in (0, 1]."""
    width: float = 0.02
    """Width of a leaf, above 0, down to which it is split (theta)."""


def start() -> dict[str, Any]:
    """Return a bandit without rewards.

    Example:
        >>> start()
        {'edges': [0.0, 1.0], 'pulls': []}
    """
    return {"edges": [0.0, 1.0], "pulls": []}


def bounds(state: State, options: EUCBOptions) -> list[float]:
    """Return the upper confidence bound of each leaf, infinite without rewards.

    ``mean + sqrt(2 ln(n) / N)``, where a reward of age a (0 = the last one) has the weight ``discount^a``, N is the sum
    of the weights of a leaf, n that of all leaves, and the mean is weighted.

    Args:
        state: The bandit.
        options: Constants of the bandit.

    Example:
        >>> state = {"edges": [0.0, 0.5, 1.0], "pulls": [[0.2, 1.0], [0.7, 3.0]]}
        >>> [round(bound, 4) for bound in bounds(state, EUCBOptions(discount=0.5))]
        [2.2735, 3.9005]
    """
    weights = [options.discount**age for age in reversed(range(len(state["pulls"])))]
    total = sum(weights)
    return [_bound(state, leaf, weights, total) for leaf in pairwise(state["edges"])]


def _bound(state: State, leaf: tuple[float, float], weights: list[float], total: float) -> float:
    own = list(_within(state, leaf, weights))
    count = sum(weight for weight, _ in own)
    if not count:
        return math.inf
    mean = sum(weight * reward for weight, reward in own) / count
    return mean + math.sqrt(2 * math.log(total) / count)


def _within(state: State, leaf: tuple[float, float], weights: list[float]) -> Iterator[tuple[float, float]]:
    """Yield the weight and the reward of each pull in a leaf."""
    for (value, reward), weight in zip(state["pulls"], weights, strict=True):
        if leaf[0] <= value < leaf[1]:
            yield weight, reward


def choose(state: State, rng: torch.Generator, options: EUCBOptions) -> float:
    """Draw a value in [0, 1), uniformly in the leaf with the best bound; of equal ones, in the lowest.

    Args:
        state: The bandit.
        rng: Generator of the draw.
        options: Constants of the bandit.

    Example:
        >>> state = {"edges": [0.0, 0.5, 1.0], "pulls": [[0.2, 1.0], [0.7, 3.0]]}
        >>> 0.5 <= choose(state, torch.Generator().manual_seed(0), EUCBOptions()) < 1
        True
    """
    scores = bounds(state, options)
    low, high = list(pairwise(state["edges"]))[scores.index(max(scores))]
    share = float(torch.rand((), dtype=torch.float64, generator=rng))
    return float(min(low + share * (high - low), math.nextafter(high, low)))


def learn(state: State, value: float, reward: float, options: EUCBOptions) -> dict[str, Any]:
    """Return the bandit after a reward, with the leaf of the value split there if it is wide enough.

    Pulls whose weight has become zero in float64 are left out, which changes no bound.

    Args:
        state: The bandit before.
        value: Value that was used, in [0, 1).
        reward: Reward of the value.
        options: Constants of the bandit.

    Example:
        >>> learn(start(), 0.25, 1.0, EUCBOptions())
        {'edges': [0.0, 0.25, 1.0], 'pulls': [[0.25, 1.0]]}
    """
    edges = list(state["edges"])
    low, high = next((low, high) for low, high in pairwise(edges) if low <= value < high)
    splits = high - low > options.width and value > low
    pulls = [*([float(v), float(r)] for v, r in state["pulls"]), [value, reward]]
    while options.discount ** (len(pulls) - 1) == 0:
        del pulls[0]
    return {"edges": sorted([*edges, value]) if splits else edges, "pulls": pulls}
