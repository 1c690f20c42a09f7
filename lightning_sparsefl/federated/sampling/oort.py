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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from numpy.typing import NDArray

from lightning_sparsefl.callbacks import LossSquares
from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.federated.sampling.client_table import ClientTable
from lightning_sparsefl.federated.sampling.draws import Randoms, numbers, randoms, weighted
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, SamplerState, Seen

_LOSS = "train_loss_sq"
"""Metric of the mean squared loss."""


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
        known = ClientTable.empty(utility=np.float64, last=np.int64, seconds=np.float64).to_plain()
        return {"known": known, "epsilon": self.exploration, "least": self.least_exploration, **pacer}

    # ---- the draw

    def draw(self, state: SamplerState, candidates: Candidates, rng: torch.Generator) -> list[int]:
        """Draw the clients; see :class:`CohortSampler`."""
        return self.choose(state, candidates, randoms(rng))

    def choose(self, state: SamplerState, candidates: Candidates, uniform: Randoms) -> list[int]:
        """Draw the clients of a round with given random numbers.

        Args:
            state: State before the round.
            candidates: Clients to draw from, and what is known of them.
            uniform: Function that returns new random numbers.
        """
        clients, table = numbers(candidates.clients), ClientTable.from_plain(state["known"])
        tried = table.knows(clients)
        known, new = clients[tried], clients[~tried]
        utility, last, seconds = (table.values(known, name) for name in ("utility", "last", "seconds"))
        preferred = percentile(seconds[~np.isnan(seconds)], state["threshold"])
        exploited = min(int(candidates.count * (1 - self._epsilon(state))), len(known))
        scored = scores(utility, last, seconds, candidates.round + 1, preferred, self.clip, self.penalty)
        eligible = self._eligible(scored, exploited)
        found = known[eligible[weighted(scored[eligible], exploited, uniform)]]
        explored = min(candidates.count - exploited, len(new))
        if explored:
            rewards = self._first_rewards(new, candidates, preferred)
            best = np.argsort(-rewards, kind="stable")[: int(self.window * explored)]
            found = np.append(found, new[best[weighted(rewards[best], explored, uniform)]])
        others = clients[~np.isin(clients, found)]  # those that fill up the cohort
        missing = candidates.count - len(found)
        return [*found.tolist(), *others[weighted(np.ones(len(others)), missing, uniform)].tolist()]

    def _epsilon(self, state: SamplerState) -> float:
        """Return the share of the next cohort that never took part."""
        return float(max(state["epsilon"] * self.exploration_decay, state["least"]))

    def _eligible(self, scored: NDArray[np.float64], count: int) -> NDArray[np.int64]:
        """Return the places of the scores that reach the cut-off, the best first."""
        ranked = np.argsort(-scored, kind="stable")
        if not len(ranked):
            return ranked
        least = self.cut_off * scored[ranked[min(count, len(ranked) - 1)]]
        eligible: NDArray[np.int64] = ranked[scored[ranked] >= least]
        return eligible

    def _first_rewards(self, new: NDArray[np.int64], candidates: Candidates, preferred: float) -> NDArray[np.float64]:
        """Return the rewards of clients that never took part."""
        samples = np.array([candidates.samples(client) for client in new.tolist()], np.float64)
        if math.isinf(preferred):
            return samples
        return samples * slowdown(_times(map(candidates.seconds, new.tolist())), preferred, self.penalty)

    # ---- what the sampler learns from a round

    def learn(self, state: SamplerState, candidates: Candidates, seen: Mapping[int, Seen]) -> SamplerState:
        """Store utilities and times, and let the pacer change the preferred time; see :class:`CohortSampler`."""
        round, before = candidates.round + 1, ClientTable.from_plain(state["known"])
        utilities = _utilities([(client, one) for client, one in seen.items() if one.counted])
        mean = sum(utilities.values()) / max(len(utilities), 1)
        clients = np.array(sorted(seen), np.int64)
        utility = [utilities.get(client, mean) for client in clients.tolist()]
        seconds = _times(seen[client].seconds for client in clients.tolist())
        seconds = np.where(np.isnan(seconds), before.values(clients, "seconds", missing=math.nan), seconds)
        exploited = [utilities.get(client, mean) for client in clients[before.knows(clients)].tolist()]
        window = [*state["history"], sum(exploited) / max(len(exploited), 1)][-2 * self.pacer_step :]
        everyone = len(before) >= len(candidates.clients)
        return {
            "known": before.updated(clients, utility=utility, last=[round] * len(seen), seconds=seconds).to_plain(),
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


def _times(values: Iterable[float | None]) -> NDArray[np.float64]:
    """Return times as an array, with NaN for those that are not known."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def scores(
    utility: NDArray[np.float64],
    last: NDArray[np.int64],
    seconds: NDArray[np.float64],
    round: int,
    preferred: float,
    clip: float = 0.95,
    penalty: float = 2.0,
) -> NDArray[np.float64]:
    """Return the scores of clients that took part.

    Args:
        utility: Samples times the root of the mean squared loss, of each client.
        last: Last round that each client took part in, from 1.
        seconds: Time of each client's last client-round; NaN = not known.
        round: Number of the round, from 1.
        preferred: Preferred time in seconds.
        clip: Quantile beyond which utilities are clipped.
        penalty: Exponent of the penalty for slow devices.

    Example:
        >>> found = scores(np.array([10.0, 40, 20]), np.array([2, 9, 5]), np.array([30.0, 50, 200]), 10, 100.0, 1.0)
        >>> found.round(7).tolist()
        [0.3396402, 1.1599509, 0.137038]
    """
    if not len(utility):
        return utility
    ordered = np.sort(utility)
    most, low = ordered[min(int(len(ordered) * clip), len(ordered) - 1)], 0.999 * ordered[0]
    span = max(ordered[-1] - low, 1e-4)
    bonus = np.sqrt(0.1 * math.log(round) / last)
    found: NDArray[np.float64] = (np.minimum(utility, most) - low) / span + bonus
    return found * slowdown(seconds, preferred, penalty)


def slowdown(seconds: NDArray[np.float64], preferred: float, penalty: float) -> NDArray[np.float64]:
    """Return the factors by which slow devices lower scores.

    Args:
        seconds: Times of client-rounds; NaN = not known.
        preferred: Preferred time.
        penalty: Exponent of the penalty.

    Example:
        >>> slowdown(np.array([50.0, 200.0, math.nan]), 100.0, 2.0)
        array([1.  , 0.25, 1.  ])
    """
    factors, slow = np.ones(len(seconds)), seconds > preferred
    factors[slow] = (preferred / seconds[slow]) ** penalty
    return factors


def percentile(values: NDArray[np.float64], percent: float) -> float:
    """Return the value below which a share of all values lies; infinity for 100 percent, or without values.

    Args:
        values: Values in any order.
        percent: Share in percent.

    Example:
        >>> percentile(np.array([30.0, 10.0, 20.0]), 50.0), percentile(np.array([1.0]), 100.0)
        (20.0, inf)
    """
    if percent >= 100 or not len(values):
        return math.inf
    return float(np.sort(values)[min(int(len(values) * percent / 100), len(values) - 1)])
