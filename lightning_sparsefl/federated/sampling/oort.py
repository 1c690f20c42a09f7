"""Oort: Efficient Federated Learning via Guided Participant Selection.

Lai, Zhu, Madhyastha, Chowdhury, OSDI 2021, arXiv:2010.06081, algorithm 1; a baseline in Table I of FedLPS
(arXiv:2412.07216).

A client's utility is its number of samples times the root of its mean squared loss. Part of a cohort is drawn among the
clients whose scores are within a cut-off of the best: the utility, a bonus for long absence, and a penalty for devices
that are slower than a preferred time. The rest is drawn among clients that never took part, those with many samples
first. The share of the latter falls over the rounds, and the preferred time follows the utilities (the pacer).

Departures from the paper and from the authors' program (SymbioticLab/Oort, FedScale):

- The score is that of the program: the bonus is ``sqrt(0.1 ln t / last round)``, and the cut-off is a share of the
  score after the last one that is needed, or a share of the last one if none follows; the program fails there.
- Smallest, largest and clipping utility are those of clients that took part; the program includes the first rewards of
  all others. The preferred time is a percentile of the times of clients that took part, so that nobody else is asked.
- The first reward of a client is its number of samples of one local epoch; in the program, which trains for a number
  of steps, it is that of these steps, if the client has as many.
- Losses are those of batches, unless the module logs those of samples, and of all epochs of the fit; the program
  squares the losses of samples.
- A client that was late gets the mean utility of the round, as in FedScale; one that failed or had no loss too.
- The pacer also counts clients that took part before and were drawn to fill up a cohort, which happens when hardly
  anybody is left who did not take part.
- The blacklist of clients that took part often is off by default in the program, and not implemented.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import LossSquares
from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, SamplerState, Seen

_LOSS = "train_loss_sq"
"""Metric of the mean squared loss."""


class Known(NamedTuple):
    """What is known of a client that took part."""

    utility: float
    """Samples times the root of the mean squared loss."""
    last: int
    """Last round that it took part in, from 1."""
    seconds: float | None
    """Time of its last client-round."""


@dataclass(frozen=True, kw_only=True)
class Oort(CohortSampler):
    """Sampling that prefers clients with large losses and fast devices.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> Oort(over_select=1.0).start()["epsilon"]
        0.9
    """

    over_select: float = 1.3
    """Factor >= 1 by which more clients are drawn than `federation.clients_per_round`; the slowest are late. A factor
    above 1 requires `federation.devices`, or an algorithm that simulates time."""
    exploration: float = 0.9
    """Share of the cohort that is drawn among clients that never took part, before the first round, in [0, 1]."""
    exploration_decay: float = 0.98
    """Factor of that share in every round, in (0, 1]."""
    least_exploration: float = 0.2
    """Lower bound of that share, in [0, 1]; 0 once every client took part."""
    clip: float = 0.95
    """Quantile of the utilities beyond which they are clipped, in (0, 1]."""
    cut_off: float = 0.95
    """Share of the cut-off score down to which clients are eligible, in (0, 1]."""
    penalty: float = 2.0
    """Exponent of the penalty for slow devices (alpha), >= 0."""
    threshold: float = 100.0
    """Percentile of the known times that is the preferred time before the first round; 100 = no penalty."""
    pacer_step: int = 20
    """Number of rounds of a window of the pacer."""
    pacer_delta: float = 5.0
    """Change of the percentile by the pacer, and its lower bound."""
    window: float = 5.0
    """Number of new clients to draw from, as a multiple of those that are drawn, >= 1."""
    losses: Literal["batch", "sample"] = "batch"
    """Squared losses: those of batches, or those of samples, whose mean the module logs as ``train_loss_sq``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within = {"exploration": (0, 1), "least_exploration": (0, 1), "threshold": (0, 100), "penalty": (0, math.inf)}
        within |= {"window": (1, math.inf), "pacer_delta": (0, 100)}
        for name, (low, high) in within.items():
            value = getattr(self, name)
            require(low <= value <= high, f"federation.sampler.{name}", value, f"a number in [{low}, {high}]")
        for name in ("exploration_decay", "clip", "cut_off"):
            value = getattr(self, name)
            require(0 < value <= 1, f"federation.sampler.{name}", value, "a number in (0, 1]")
        require(self.pacer_step >= 1, "federation.sampler.pacer_step", self.pacer_step, "a whole number >= 1")

    def callbacks(self) -> list[Callback]:
        """Return the callback that measures the losses of batches."""
        return [LossSquares(_LOSS)] if self.losses == "batch" else []

    def start(self) -> SamplerState:
        """Return the state before the first round: nobody took part."""
        pacer = {"threshold": self.threshold, "history": [0.0]}
        return {"known": {}, "epsilon": self.exploration, "least": self.least_exploration, **pacer}

    # ---- the draw

    def draw(self, state: SamplerState, candidates: Candidates, rng: torch.Generator) -> list[int]:
        """Draw the clients; see :class:`CohortSampler`."""
        return self.choose(state, candidates, lambda: float(torch.rand((), dtype=torch.float64, generator=rng)))

    def choose(self, state: SamplerState, candidates: Candidates, uniform: Callable[[], float]) -> list[int]:
        """Draw the clients of a round with given random numbers.

        Args:
            state: State before the round.
            candidates: Clients to draw from, and what is known of them.
            uniform: Function that returns a new number in [0, 1).
        """
        known = {client: Known(*state["known"][client]) for client in candidates.clients if client in state["known"]}
        preferred = percentile([one.seconds for one in known.values() if one.seconds is not None], state["threshold"])
        exploited = min(int(candidates.count * (1 - self._epsilon(state))), len(known))
        scored = scores(known, candidates.round + 1, preferred, self.clip, self.penalty)
        found = weighted(self._eligible(scored, exploited), exploited, uniform)
        new = [client for client in candidates.clients if client not in known]
        explored = min(candidates.count - exploited, len(new))
        found += weighted(self._first_rewards(new, explored, candidates, preferred), explored, uniform)
        return found + _filled_up(candidates, found, uniform)

    def _epsilon(self, state: SamplerState) -> float:
        """Return the share of the next cohort that never took part."""
        return float(max(state["epsilon"] * self.exploration_decay, state["least"]))

    def _eligible(self, scored: Mapping[int, float], count: int) -> dict[int, float]:
        """Return the clients whose scores reach the cut-off, the best first."""
        ranked = sorted(scored, key=lambda client: (-scored[client], client))
        if not ranked:
            return {}
        least = self.cut_off * scored[ranked[min(count, len(ranked) - 1)]]
        return {client: scored[client] for client in ranked if scored[client] >= least}

    def _first_rewards(
        self, new: Sequence[int], count: int, candidates: Candidates, preferred: float
    ) -> dict[int, float]:
        """Return the largest rewards of clients that never took part."""

        def reward(client: int) -> float:
            samples = float(candidates.samples(client))
            seconds = None if math.isinf(preferred) else candidates.seconds(client)
            return samples * slowdown(seconds, preferred, self.penalty)

        rewards = ((reward(client), -client) for client in new)
        return {-place: value for value, place in heapq.nlargest(int(self.window * count), rewards)}

    # ---- what a round tells

    def learn(self, state: SamplerState, candidates: Candidates, seen: Mapping[int, Seen]) -> SamplerState:
        """Store utilities and times, and let the pacer change the preferred time; see :class:`CohortSampler`."""
        round, before = candidates.round + 1, state["known"]
        utilities = _utilities([(client, one) for client, one in seen.items() if one.counted])
        mean = sum(utilities.values()) / max(len(utilities), 1)
        known = dict(before)
        for client, one in seen.items():
            seconds = before[client][2] if one.seconds is None and client in before else one.seconds
            known[client] = [utilities.get(client, mean), round, seconds]
        exploited = [known[client][0] for client in seen if client in before]
        window = [*state["history"], sum(exploited) / max(len(exploited), 1)][-2 * self.pacer_step :]
        everyone = len(before) >= len(candidates.clients)
        return {
            "known": known,
            "epsilon": 0.0 if everyone else self._epsilon(state),
            "least": 0.0 if everyone else state["least"],
            "threshold": self._paced(state["threshold"], window, round + 1),
            "history": window,
        }

    def _paced(self, threshold: float, history: Sequence[float], round: int) -> float:
        """Return the percentile for a round, after the utilities of the rounds before."""
        if round < 2 * self.pacer_step or round % self.pacer_step:
            return threshold
        before, now = sum(history[: self.pacer_step]), sum(history[self.pacer_step :])
        if abs(now - before) <= 0.1 * before:
            return min(100.0, threshold + self.pacer_delta)
        if abs(now - before) >= 5 * before:
            return max(self.pacer_delta, threshold - self.pacer_delta)
        return threshold


def _utilities(counted: Sequence[tuple[int, Seen]]) -> dict[int, float]:
    """Return the utilities of merged clients; a client whose batches were all skipped has none, if another has one."""
    told = [one for one in counted if _LOSS in one[1].metrics]
    return {client: utility(seen) for client, seen in told or counted}


def utility(seen: Seen) -> float:
    """Return the utility of a client: its samples times the root of its mean squared loss.

    Args:
        seen: Results of the client in the round.

    Raises:
        InvalidOption: If the losses are not known.
    """
    if _LOSS not in seen.metrics:
        raise InvalidOption(
            f"`federation.sampler` is Oort, which needs the metric {_LOSS!r}; expected a `training_step` that returns "
            "the loss, or one that logs the metric, with `losses: sample`."
        )
    return seen.samples * math.sqrt(seen.metrics[_LOSS])


def scores(
    known: Mapping[int, Known], round: int, preferred: float, clip: float = 0.95, penalty: float = 2.0
) -> dict[int, float]:
    """Return the scores of clients that took part.

    Args:
        known: Facts of each client that took part, by its number.
        round: Number of the round, from 1.
        preferred: Preferred time in seconds.
        clip: Quantile beyond which utilities are clipped.
        penalty: Exponent of the penalty for slow devices.

    Example:
        >>> known = {0: Known(10.0, 2, 30.0), 1: Known(40.0, 9, 50.0), 2: Known(20.0, 5, 200.0)}
        >>> [round(score, 7) for score in scores(known, 10, 100.0, clip=1.0).values()]
        [0.3396402, 1.1599509, 0.137038]
    """
    ordered = sorted(one.utility for one in known.values())
    if not ordered:
        return {}
    most, low = ordered[min(int(len(ordered) * clip), len(ordered) - 1)], 0.999 * ordered[0]
    span = max(ordered[-1] - low, 1e-4)
    return {
        client: ((min(one.utility, most) - low) / span + math.sqrt(0.1 * math.log(round) / one.last))
        * slowdown(one.seconds, preferred, penalty)
        for client, one in known.items()
    }


def slowdown(seconds: float | None, preferred: float, penalty: float) -> float:
    """Return the factor by which a slow device lowers a score.

    Args:
        seconds: Time of a client-round; None = not known.
        preferred: Preferred time.
        penalty: Exponent of the penalty.

    Example:
        >>> slowdown(50.0, 100.0, 2.0), slowdown(200.0, 100.0, 2.0)
        (1.0, 0.25)
    """
    return 1.0 if seconds is None or seconds <= preferred else float((preferred / seconds) ** penalty)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which a share of all values lies; infinity for 100 percent, or without values.

    Args:
        values: Values in any order.
        percent: Share in percent.

    Example:
        >>> percentile([30.0, 10.0, 20.0], 50.0), percentile([1.0], 100.0)
        (20.0, inf)
    """
    if percent >= 100 or not values:
        return math.inf
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)]


def weighted(weights: Mapping[int, float], count: int, uniform: Callable[[], float]) -> list[int]:
    """Draw clients without replacement, with probabilities in proportion to the weights of those that are left.

    Args:
        weights: Weights >= 0 by client; if those that are left are all zero, they are equally likely.
        count: Number of clients to draw, at most all.
        uniform: Function that returns a new number in [0, 1).

    Example:
        >>> weighted({3: 1.0, 5: 2.0, 7: 1.0}, 2, iter([0.5, 0.1]).__next__)
        [5, 3]
    """
    left, found = dict(weights), list[int]()
    for _ in range(count):
        total = sum(left.values())
        mark, passed = uniform() * (total or len(left)), 0.0
        chosen = None
        for client, weight in left.items():
            passed += weight if total else 1.0
            chosen = client
            if passed > mark:
                break
        assert chosen is not None
        found.append(chosen)
        del left[chosen]
    return found


def _filled_up(candidates: Candidates, found: Sequence[int], uniform: Callable[[], float]) -> list[int]:
    """Draw the clients that are missing uniformly."""
    missing = candidates.count - len(found)
    if not missing:
        return []
    taken: set[Any] = set(found)
    return weighted({client: 1.0 for client in candidates.clients if client not in taken}, missing, uniform)
