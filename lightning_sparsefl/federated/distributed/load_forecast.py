"""Forecast of the work of each client and the speed of each rank, from earlier rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_REMEMBERED = 65_536
"""Maximum number of clients whose FLOPs are stored, which bounds the memory for large fleets."""
_KEPT = 0.5
"""Decay of older rounds in a rank's speed, per round."""

_PRIOR = 0.1
"""Weight of the mean speed in each rank's speed, as a fraction of the mean work of a rank."""


class Job(NamedTuple):
    """The cost of one client's finished round, known to every rank."""

    client: int
    rank: int
    flops: float
    """FLOPs that the ledger was charged."""
    seconds: float
    """Duration by the clock of its rank, in seconds."""


class LoadForecast:
    """Forecast of the work of clients and of the seconds per unit of work of ranks.

    The work of a client is the FLOPs of its last round. Before its first one, it is proportional to its samples times
    its capacity, with the factor observed for other clients. The speed of a rank is the measured time per FLOP. All
    ranks get the same numbers, so their plans are equal. The clock affects only the placement of clients, not the
    results, since a round's sums are exact.

    Args:
        ranks: Number of ranks.

    Example:
        >>> forecast = LoadForecast(ranks=2)
        >>> forecast.loads({0: 10.0, 1: 20.0})
        {0: 10.0, 1: 20.0}
        >>> forecast.learn([Job(0, 0, flops=100.0, seconds=1.0), Job(1, 1, flops=50.0, seconds=1.0)])
        >>> forecast.loads({0: 10.0, 2: 30.0}), [round(pace, 4) for pace in forecast.seconds_per_flop]
        ({0: 100.0, 2: 150.0}, [0.0102, 0.0191])
    """

    def __init__(self, ranks: int) -> None:
        self._guesses: Mapping[int, float] = {}
        self._flops: dict[int, float] = {}
        self._per_guess = 1.0
        self._work, self._seconds = [0.0] * ranks, [0.0] * ranks

    def loads(self, guesses: Mapping[int, float]) -> dict[int, float]:
        """Return the expected FLOPs of each client of a cohort; before the first round, in the unit of `guesses`.

        Args:
            guesses: Numbers proportional to the work by client, such as samples times capacity.
        """
        self._guesses = guesses
        return {client: self._flops.get(client, guess * self._per_guess) for client, guess in guesses.items()}

    def learn(self, jobs: Iterable[Job]) -> None:
        """Update the forecast with a cohort's round, after :meth:`loads` of the same cohort.

        Args:
            jobs: Jobs of the cohort; those without FLOPs are ignored.
        """
        done = [job for job in jobs if job.flops > 0]
        guessed = math.fsum(self._guesses[job.client] for job in done)
        if not guessed:
            return
        self._per_guess = math.fsum(job.flops for job in done) / guessed
        self._work = [_KEPT * work for work in self._work]
        self._seconds = [_KEPT * seconds for seconds in self._seconds]
        for job in done:
            self._flops.pop(job.client, None)  # reinsert at the end, so that the oldest is first
            self._flops[job.client] = job.flops
            self._work[job.rank] += job.flops
            self._seconds[job.rank] += job.seconds
        while len(self._flops) > _REMEMBERED:
            del self._flops[next(iter(self._flops))]

    @property
    def seconds_per_flop(self) -> list[float]:
        """Seconds per FLOP of each rank, shrunk towards the mean so that an idle rank gets work again."""
        total = math.fsum(self._work)
        if not total:
            return [1.0] * len(self._work)
        mean, prior = math.fsum(self._seconds) / total, _PRIOR * total / len(self._work)
        return [(s + mean * prior) / (work + prior) for s, work in zip(self._seconds, self._work, strict=True)]
