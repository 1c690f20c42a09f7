"""P-UCBV: the bandit of FedLPS, which chooses the density at which a client trains next.

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section III-C,
Algorithm 2. An arm is an interval of densities; it is split at the density that was used, and arms are compared by
upper confidence bounds that include the variance of their rewards. The functions are pure. A client's state is a dict
of numbers and lists, which a checkpoint can hold::

    {"arms": [{"low": 0.0, "high": 0.2, "pulls": 0, "mean": 0.0, "squares": 0.0}, ...], "selections": 0,
     "accuracy": None}

`squares` is the sum of the squared deviations of the rewards from their mean. The state stores these sums instead of
the rewards; only the list of arms grows, by at most one arm per selection.

The server does not know a client's capability (section III-B), so every arm is a candidate and :func:`choose` returns
a density of up to 1. The caller reduces it to the capability and passes the reduced density to :func:`learn`, which
credits the arm that contains it (Algorithm 2, line 1).

What to expect: with 100 rounds of 10 clients the exploration bonus is 0 from a client's third selection on (xi psi eps
is 4, 1.39 and .51 with 5, 6 and 7 arms), so that most choices follow the mean reward alone. The reward of a client's
first rounds is by far the largest, since the accuracy rises most there, and is shared by all parts of the arm that
received it.

Departures from the paper:

- An arm without rewards is chosen before all others (``explore="untried"``). Equation 16 leaves its mean undefined;
  0, the literal reading, moves clients to small densities soon (``explore="bonus"``).
- The logarithm of the bonus is at least 0. The paper leaves the bonus undefined where the logarithm is negative.
- The lower part of an arm is eliminated only if another arm remains.
- Accuracies are in [0, 1], in the utility too, whose scale the paper does not give; `drop` (the paper's -Delta), `rho`
  and the number of arms are not given either.
- The previous accuracy is that of the client's last participation, which may be many rounds ago.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch

Arm: TypeAlias = Mapping[str, Any]
"""An interval ``(low, high]`` of densities with the statistics of its rewards."""
State: TypeAlias = Mapping[str, Any]
"""What the server stores about one client's bandit."""
Explore: TypeAlias = Literal["untried", "bonus", "epsilon"]
"""How arms without rewards are explored; see :class:`PUCBVOptions`."""


@dataclass(frozen=True, kw_only=True)
class PUCBVOptions:
    """Constants of P-UCBV."""

    arms: int = 5
    """Number of equal intervals at the start (the paper's I_0)."""
    lowest: float = 0.0
    """Lower end of the range of densities that the arms cover, in [0, 1)."""
    rho: float = 0.5
    """Weight of the exploration bonus."""
    xi: float = 10.0
    """Rounds of the run divided by clients per round; scales the bonus."""
    drop: float = 0.05
    """Fall of the accuracy, in [0, 1], beyond which the densities below are eliminated (the paper's -Delta)."""
    explore: Explore = "untried"
    """``"untried"``: arms without rewards come first. ``"bonus"``: their mean is 0, and only the bonus explores.
    ``"epsilon"``: as ``"bonus"``, but with probability ``1 / max(m - 1, 1)`` the m-th selection draws an arm uniformly
    (the authors' program)."""
    compare_with: Literal["last", "best"] = "last"
    """Accuracy that a new one is compared with: that of the last participation, or the best so far (the authors'
    program)."""


def start(options: PUCBVOptions) -> dict[str, Any]:
    """Return the state of a client's bandit before its first round.

    Example:
        >>> [arm["high"] for arm in start(PUCBVOptions(arms=4))["arms"]]
        [0.25, 0.5, 0.75, 1.0]
    """
    width = 1 - options.lowest
    edges = [options.lowest + width * part / options.arms for part in range(options.arms + 1)]
    untried = {"pulls": 0, "mean": 0.0, "squares": 0.0}
    arms = [{"low": low, "high": high, **untried} for low, high in pairwise(edges)]
    return {"arms": arms, "selections": 0, "accuracy": None}


def choose(state: State, rng: torch.Generator, options: PUCBVOptions) -> float:
    """Draw the density of a client's next round from the arm with the highest score.

    Args:
        state: The client's bandit.
        rng: Generator that breaks ties and draws the density within the arm.
        options: Constants of the bandit.

    Returns:
        A density in (0, 1], not yet reduced to the client's capability.

    Example:
        >>> 0 < choose(start(PUCBVOptions()), torch.Generator().manual_seed(0), PUCBVOptions()) <= 1
        True
    """
    arms = state["arms"]
    if options.explore == "epsilon" and _uniform(rng) <= 1 / max(state["selections"], 1):
        best = arms
    else:
        scores = [score(arm, state, options) for arm in arms]
        best = [arm for arm, value in zip(arms, scores, strict=True) if value == max(scores)]
    arm = best[int(torch.randint(len(best), (1,), generator=rng))]
    low, high = float(arm["low"]), float(arm["high"])
    return min(max(low + _uniform(rng) * (high - low), math.nextafter(low, 1.0)), high)


def _uniform(rng: torch.Generator) -> float:
    """Draw a number from (0, 1]."""
    return 1.0 - float(torch.rand((), dtype=torch.float64, generator=rng))


def score(arm: Arm, state: State, options: PUCBVOptions) -> float:
    """Return the upper confidence bound of an arm (eq. 17); infinite without rewards if ``explore="untried"``.

    ``mean + sqrt(rho (var + 2) log(max(xi psi eps, 1)) / (4 (pulls + 1)))`` with ``psi = xi / arms**2`` and
    ``eps = 2**-selections``.

    Example:
        >>> state = {"arms": [{"low": 0.0, "high": 1.0, "pulls": 1, "mean": 0.5, "squares": 0.0}], "selections": 9}
        >>> score(state["arms"][0], state, PUCBVOptions())
        0.5
    """
    pulls: int = arm["pulls"]
    if not pulls and options.explore == "untried":
        return math.inf
    psi, eps = options.xi / len(state["arms"]) ** 2, 0.5 ** state["selections"]
    bonus = math.log(max(options.xi * psi * eps, 1.0)) / (4 * (pulls + 1))
    return float(arm["mean"]) + math.sqrt(options.rho * (arm["squares"] / max(pulls, 1) + 2) * bonus)


def utility(accuracy: float) -> float:
    """Return ``U(x) = 10 - 20 / (1 + exp(.35 x))``, about 1.75 x for accuracies in [0, 1].

    Example:
        >>> utility(0.0), round(utility(1.0), 3)
        (0.0, 1.732)
    """
    return 10 - 20 / (1 + math.exp(0.35 * accuracy))


def learn(
    state: State, density: float, accuracy: float, before: float, seconds: float, options: PUCBVOptions
) -> dict[str, Any]:
    """Return the state of a client's bandit after a round (Algorithm 2).

    The arm that contains the density is split there, and both parts keep its rewards and receive the new one
    (eq. 15). A density that no arm contains, because its interval was eliminated or lies below `lowest`, earns no
    reward.

    Args:
        state: The bandit before the round.
        density: Density of the round, after its reduction to the client's capability.
        accuracy: Accuracy of the round, in [0, 1].
        before: Accuracy that it is compared with, in [0, 1].
        seconds: Duration of the round, above 0.
        options: Constants of the bandit.
    """
    arms = list(state["arms"])
    place = next((i for i, arm in enumerate(arms) if arm["low"] < density <= arm["high"]), None)
    if place is not None:
        reward = (utility(accuracy) - utility(before)) / seconds
        parts = _split(arms[place], density, reward)
        eliminate = accuracy - before < -options.drop and len(arms) + len(parts) > 2  # another arm remains
        arms[place : place + 1] = parts[1:] if eliminate else parts
    reference = max(before, accuracy) if options.compare_with == "best" else accuracy
    return {"arms": arms, "selections": state["selections"] + 1, "accuracy": reference}


def _split(arm: Arm, density: float, reward: float) -> list[Arm]:
    """Return the parts of an arm up to and above a density, with the reward added; one part if the other is empty."""
    edges = [arm["low"], density, arm["high"]] if density < arm["high"] else [arm["low"], arm["high"]]
    rewarded = {**arm, **_rewarded(arm, reward)}
    return [{**rewarded, "low": low, "high": high} for low, high in pairwise(edges)]


def _rewarded(arm: Arm, reward: float) -> dict[str, Any]:
    """Update the mean and the sum of squared deviations by one reward (Welford's method)."""
    pulls, mean = arm["pulls"] + 1, arm["mean"] + (reward - arm["mean"]) / (arm["pulls"] + 1)
    return {"pulls": pulls, "mean": mean, "squares": arm["squares"] + (reward - arm["mean"]) * (reward - mean)}
