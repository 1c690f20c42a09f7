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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_sparsefl.errors import require
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.sampling.oort import weighted
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, SamplerState, Seen


@dataclass(frozen=True, kw_only=True)
class REFL(CohortSampler):
    """Sampling that prefers clients that will soon be unavailable, and merges late updates; needs simulated times.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> REFL(rest=3).start()
        {'mean': None, 'last': {}}
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
        return {"mean": None, "last": {}}

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
        return self.choose(state, candidates, lambda: float(torch.rand((), dtype=torch.float64, generator=rng)))

    def choose(self, state: SamplerState, candidates: Candidates, uniform: Callable[[], float]) -> list[int]:
        """Draw the clients of a round with given random numbers.

        Args:
            state: State before the round.
            candidates: Facts of the clients.
            uniform: Function that returns a new number in [0, 1).
        """
        rested = [client for client in candidates.clients if self._rested(state, candidates, client)]
        leaving = set(self._leaving(state, candidates, rested, uniform))
        kept = set(rested)
        groups = (
            [client for client in rested if client in leaving],
            [client for client in rested if client not in leaving],
            [client for client in candidates.clients if client not in kept],
        )
        found = list[int]()
        for group in groups:
            wanted = min(candidates.count - len(found), len(group))
            found += weighted(dict.fromkeys(group, 1.0), wanted, uniform)
        return found

    def _rested(self, state: SamplerState, candidates: Candidates, client: int) -> bool:
        """Return whether a client had no turn in the last rounds, and has no pending update."""
        last = state["last"].get(client)
        return client not in candidates.arrivals and (last is None or candidates.round - last >= self.rest)

    def _leaving(
        self, state: SamplerState, candidates: Candidates, clients: Sequence[int], uniform: Callable[[], float]
    ) -> list[int]:
        """Return the clients that are forecast to be unavailable when the next round starts."""
        if candidates.available is None or state["mean"] is None:
            return []
        then = candidates.now + state["mean"]
        return [
            client
            for client in clients
            if (uniform() < self.accuracy) != candidates.available(client, then)  # a wrong forecast is the opposite
        ]

    def learn(self, state: SamplerState, candidates: Candidates, seen: Mapping[int, Seen]) -> SamplerState:
        """Store who had a turn, and the mean duration of a round; see :class:`CohortSampler`."""
        times = [one.seconds for one in seen.values() if one.counted and one.seconds is not None]
        mean, last = state["mean"], dict.fromkeys(seen, candidates.round)
        if times:
            mean = max(times) if mean is None else (1 - self.memory) * max(times) + self.memory * mean
        return {"mean": mean, "last": {**state["last"], **last}}
