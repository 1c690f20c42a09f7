"""The bandit of FedLPS: which density a client trains at, from the rewards of earlier ones (P-UCBV).

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section 4.
An arm is an interval of densities, which is split where it was tried; arms compare by upper confidence bounds that know
the rewards' variance. Pure functions; the state is a dict of numbers and lists, so that a checkpoint can hold it. It
keeps sums, not rewards; what grows is the list of arms, by one or none at each selection::

    {"arms": [{"low": 0.0, "high": 0.2, "pulls": 0, "mean": 0.0, "squares": 0.0}, ...], "eps": 1.0, "accuracy": None}

`squares` is the sum of the rewards' squared deviations from their mean.

Departures: the paper's equations leave the logarithm of numbers below 1 undefined, after which its bonus is gone and
most arms are never tried. Here the bonus is 0 there, and an arm that was never pulled comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

Arm = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The bandit's constants."""

    arms: int = 5
    """Equal parts of (0, 1] to start from (the paper's I_0)."""
    rho: float = 0.5
    """Weight of the bonus for what is little known."""
    xi: float = 10.0
    """Rounds of the run over clients of a round; scales the bonus."""
    drop: float = 0.05
    """How far the accuracy, in [0, 1], must fall for the densities below to be given up (the paper's -Delta)."""


def start(options: Options) -> dict[str, Any]:
    """A client's bandit before its first round.

    Example:
        >>> [arm["high"] for arm in start(Options(arms=4))["arms"]]
        [0.25, 0.5, 0.75, 1.0]
    """
    edges = [part / options.arms for part in range(options.arms + 1)]
    untried = {"pulls": 0, "mean": 0.0, "squares": 0.0}
    arms = [{"low": low, "high": high, **untried} for low, high in pairwise(edges)]
    return {"arms": arms, "eps": 1.0, "accuracy": None}


def choose(state: State, capacity: float, rng: torch.Generator, options: Options) -> float:
    """The density of a client's next round, in (0, capacity].

    Args:
        state: The client's.
        capacity: The largest density that the client can train, in (0, 1].
        rng: Breaks ties, and draws the density within its arm.
        options: The bandit's.

    Example:
        >>> 0 < choose(start(Options()), 0.125, torch.Generator().manual_seed(0), Options()) <= 0.125
        True
    """
    candidates = _candidates(state, capacity)
    if not candidates:
        return capacity
    scores = [score(arm, state, options) for arm in candidates]
    best = [arm for arm, value in zip(candidates, scores, strict=True) if value == max(scores)]
    arm = best[int(torch.randint(len(best), (1,), generator=rng))]
    share = 1.0 - float(torch.rand((), dtype=torch.float64, generator=rng))  # in (0, 1]
    low, high = float(arm["low"]), min(float(arm["high"]), capacity)
    return min(max(low + share * (high - low), math.nextafter(low, 1.0)), high)


def score(arm: Arm, state: State, options: Options) -> float:
    """Mean reward, and the more the fewer and the more varied the rewards are; infinite without any.

    ``mean + sqrt(rho (var + 2) log(max(xi psi eps, 1)) / (4 (pulls + 1)))`` with ``psi = xi / arms**2``.
    """
    pulls: int = arm["pulls"]
    if not pulls:
        return math.inf
    psi = options.xi / len(state["arms"]) ** 2
    unknown = math.log(max(options.xi * psi * state["eps"], 1.0)) / (4 * (pulls + 1))
    return float(arm["mean"]) + math.sqrt(options.rho * (arm["squares"] / pulls + 2) * unknown)


def utility(accuracy: float) -> float:
    """``U(x) = 10 - 20 / (1 + exp(.35 x))``, near to 1.75 x for accuracies in [0, 1].

    Example:
        >>> utility(0.0), round(utility(1.0), 3)
        (0.0, 1.732)
    """
    return 10 - 20 / (1 + math.exp(0.35 * accuracy))


def learn(
    state: State, capacity: float, density: float, accuracy: float, before: float, seconds: float, options: Options
) -> dict[str, Any]:
    """The client's bandit after a round.

    Args:
        state: Before it.
        capacity: The client's in this round.
        density: That was tried.
        accuracy: Reached, in [0, 1].
        before: The accuracy of the client's last round, in [0, 1].
        seconds: That the round took, above 0.
        options: The bandit's.
    """
    arms = list(state["arms"])
    place = next((i for i, arm in enumerate(arms) if arm["low"] < density <= arm["high"]), None)
    if place is not None:
        reward = (utility(accuracy) - utility(before)) / seconds
        parts = _split(arms[place], density, reward)
        others = [arm for arm in _candidates(state, capacity) if arm is not arms[place]] + _below(parts[1:], capacity)
        fell = accuracy - before < -options.drop
        arms[place : place + 1] = parts[1:] if fell and others else parts
    return {"arms": arms, "eps": state["eps"] / 2, "accuracy": accuracy}


def _candidates(state: State, capacity: float) -> list[Arm]:
    return _below(state["arms"], capacity)


def _below(arms: Sequence[Arm], capacity: float) -> list[Arm]:
    """The arms that hold a density below the capacity."""
    return [arm for arm in arms if arm["low"] < capacity]


def _split(arm: Arm, density: float, reward: float) -> list[Arm]:
    """The arm up to the density and the arm above it, each with all rewards; one where the other has no width."""
    edges = [arm["low"], density, arm["high"]] if density < arm["high"] else [arm["low"], arm["high"]]
    rewarded = {**arm, **_rewarded(arm, reward)}
    return [{**rewarded, "low": low, "high": high} for low, high in pairwise(edges)]


def _rewarded(arm: Arm, reward: float) -> dict[str, Any]:
    """Welford's update of the mean and of the squared deviations."""
    pulls, mean = arm["pulls"] + 1, arm["mean"] + (reward - arm["mean"]) / (arm["pulls"] + 1)
    return {"pulls": pulls, "mean": mean, "squares": arm["squares"] + (reward - arm["mean"]) * (reward - mean)}
