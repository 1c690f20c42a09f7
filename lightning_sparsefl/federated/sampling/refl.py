"""REFL: Resource-Efficient Federated Learning.

Abdelmoniem, Sahu, Canini, Fahmy, EuroSys 2023, arXiv:2111.01108; a baseline in Table I of FedLPS (arXiv:2412.07216).

Clients that will soon be unavailable are drawn first, so that those that are seldom available take part too. A round
waits for the fastest clients only; the updates of the others are merged in the rounds in which they arrive, with
factors that fall with their age and rise with their deviation from the mean. Clients are not drawn again soon, and a
round waits for fewer updates if late ones are expected.

Departures from the paper and from the authors' program (ahmedcs/REFL):

- A late client is trained in the round that it was drawn in, from the weights that it received then. What it keeps for
  itself is stored, and its costs are charged, in that round; only its update waits.
- A round ends with the last update that it waits for, not at a deadline. Late are the clients with the longest expected
  times, which are known before the training.
- The factors multiply the updates' own weights, such as numbers of samples; the program has equal weights.
- The deviation is not divided by the squared norm of the mean, which cancels. The program can divide the exponential
  by a number, 10 by default; the factor here is that of the paper.
- A client is forecast to be unavailable if it is so at one mean duration of a round from now, and a wrong forecast is
  the opposite; the program leaves a tenth of the clients out instead. Without `federation.availability` there is no
  forecast.
- If too few clients are rested, those that are not are drawn too.
- A client that becomes unavailable finishes its work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_sparsefl.errors import require
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.sampling.client_table import ClientTable
from lightning_sparsefl.federated.sampling.draws import Randoms, numbers, randoms, weighted
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, SamplerState, Seen


@dataclass(frozen=True, kw_only=True)
class REFL(CohortSampler):
    """Sampling that prefers clients that will soon be unavailable, and merges late updates; needs simulated times.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> state = REFL(rest=3).start()
        >>> state["mean"], state["turns"]["client"].tolist()
        (None, [])
    """

    over_select: float = 1.3
    """Factor >= 1 by which more clients are drawn than a round waits for; the slowest are late."""
    rest: int = 5
    """Number of rounds from a client's turn to the first one in which it may be drawn again, >= 0."""
    accuracy: float = 0.9
    """Probability that the forecast of a client's availability is right, in [0, 1]."""
    target: Literal["adaptive", "half", "fixed"] = "adaptive"
    """Number of updates that a round waits for: `federation.clients_per_round` minus the late ones that are expected to
    arrive; the same, but at least half; or always `clients_per_round`."""
    memory: float = 0.25
    """Weight of the earlier rounds in the mean duration of a round, in [0, 1]."""
    beta: float = 0.35
    """Share of the deviation in the factor of a late update, in [0, 1]; the rest is that of its age."""
    limit: int | None = None
    """Largest number of rounds after which a late update is merged, >= 1; null = no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rest >= 0, "federation.sampler.rest", self.rest, "a whole number >= 0")
        for name in ("accuracy", "memory"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"federation.sampler.{name}", value, "a number in [0, 1]")
        self.late_merge()  # checks its options

    def late_merge(self) -> StaleMean:
        """Return the mean with factors by age and deviation."""
        return StaleMean(beta=self.beta, limit=self.limit)

    def start(self) -> SamplerState:
        """Return the state before the first round: no mean duration of a round, and nobody had a turn."""
        return {"mean": None, "turns": ClientTable.empty(last=np.int64).to_plain()}

    def needed(self, state: SamplerState, candidates: Candidates) -> int:
        """Return the number of updates that a round waits for; see :class:`CohortSampler`."""
        if self.target == "fixed":
            return candidates.count
        until = candidates.now + (state["mean"] or 0.0)
        expected = sum(arrival <= until for arrival in candidates.arrivals.values())
        least = 1 if self.target == "adaptive" else math.ceil(candidates.count / 2)
        return max(least, candidates.count - expected)

    def draw(self, state: SamplerState, candidates: Candidates, rng: torch.Generator) -> list[int]:
        """Draw the clients; see :class:`CohortSampler`."""
        return self.choose(state, candidates, randoms(rng))

    def choose(self, state: SamplerState, candidates: Candidates, uniform: Randoms) -> list[int]:
        """Draw the clients of a round with given random numbers.

        Args:
            state: State before the round.
            candidates: Facts of the clients.
            uniform: Function that returns new random numbers.
        """
        clients = numbers(candidates.clients)
        rested = self._rested(state, candidates, clients)
        leaving = np.zeros(len(clients), np.bool_)
        leaving[rested] = self._leaving(state, candidates, clients[rested], uniform)
        found = list[int]()
        for group in (clients[leaving], clients[rested & ~leaving], clients[~rested]):
            wanted = min(candidates.count - len(found), len(group))
            found += group[weighted(np.ones(len(group)), wanted, uniform)].tolist()
        return found

    def _rested(self, state: SamplerState, candidates: Candidates, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which clients had no turn in the last rounds, and have no pending update."""
        last = ClientTable.from_plain(state["turns"]).values(clients, "last", missing=candidates.round - self.rest)
        pending = np.fromiter(candidates.arrivals, np.int64, len(candidates.arrivals))
        rested: NDArray[np.bool_] = (candidates.round - last >= self.rest) & ~np.isin(clients, pending)
        return rested

    def _leaving(
        self, state: SamplerState, candidates: Candidates, clients: NDArray[np.int64], uniform: Randoms
    ) -> NDArray[np.bool_]:
        """Return which clients are forecast to be unavailable when the next round starts."""
        if candidates.available is None or state["mean"] is None:
            return np.zeros(len(clients), np.bool_)
        then = candidates.now + state["mean"]
        available = np.array([candidates.available(client, then) for client in clients.tolist()], np.bool_)
        wrong = uniform(len(clients)) >= self.accuracy
        forecast: NDArray[np.bool_] = np.where(wrong, available, ~available)
        return forecast

    def learn(self, state: SamplerState, candidates: Candidates, seen: Mapping[int, Seen]) -> SamplerState:
        """Store who had a turn, and the mean duration of a round; see :class:`CohortSampler`."""
        times = [one.seconds for one in seen.values() if one.counted and one.seconds is not None]
        mean, turns = state["mean"], ClientTable.from_plain(state["turns"])
        if times:
            mean = max(times) if mean is None else (1 - self.memory) * max(times) + self.memory * mean
        turns = turns.updated(np.array(sorted(seen), np.int64), last=[candidates.round] * len(seen))
        return {"mean": mean, "turns": turns.to_plain()}
