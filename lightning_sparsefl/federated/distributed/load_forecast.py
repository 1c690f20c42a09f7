"""How much work a client will be, and how fast each rank is, foreseen from the rounds before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_REMEMBERED = 65_536
"""Clients whose FLOPs are remembered, so that a large fleet needs no more memory than a small one."""
_KEPT = 0.5
"""Share of the older rounds in a rank's pace, from round to round."""

_PRIOR = 0.1
"""Work that a rank is taken to have done at the mean pace, as a share of a rank's mean work."""


class Job(NamedTuple):
    """One client's finished round, as every rank learns of it."""

    client: int
    rank: int
    flops: float
    """As they were charged."""
    seconds: float
    """By the clock of its rank."""


class LoadForecast:
    """Expected work of clients, and seconds per unit of work on each rank.

    A client's work is the FLOPs it was charged for last; before that, its samples times its capacity, at the FLOPs that
    others were charged for these. A rank's pace is what its clock showed for the FLOPs it did. All ranks learn the same
    numbers, so all plan alike; the clock decides who trains where and nothing else, since a round's sums are exact.

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
        """Expected FLOPs of a cohort; in an unknown unit until a round has told.

        Args:
            guesses: Numbers in proportion to the work, such as samples times capacity.
        """
        self._guesses = guesses
        return {client: self._flops.get(client, guess * self._per_guess) for client, guess in guesses.items()}

    def learn(self, jobs: Iterable[Job]) -> None:
        """Take note of a cohort's round, after :meth:`loads` of the same cohort; jobs without FLOPs teach nothing."""
        done = [job for job in jobs if job.flops > 0]
        guessed = math.fsum(self._guesses[job.client] for job in done)
        if not guessed:
            return
        self._per_guess = math.fsum(job.flops for job in done) / guessed
        self._work = [_KEPT * work for work in self._work]
        self._seconds = [_KEPT * seconds for seconds in self._seconds]
        for job in done:
            self._flops.pop(job.client, None)  # to the end, so that the oldest stands first
            self._flops[job.client] = job.flops
            self._work[job.rank] += job.flops
            self._seconds[job.rank] += job.seconds
        while len(self._flops) > _REMEMBERED:
            del self._flops[next(iter(self._flops))]

    @property
    def seconds_per_flop(self) -> list[float]:
        """Seconds per FLOP of each rank, a little drawn to the mean: a rank without work is tried again some day."""
        total = math.fsum(self._work)
        if not total:
            return [1.0] * len(self._work)
        mean, prior = math.fsum(self._seconds) / total, _PRIOR * total / len(self._work)
        return [(s + mean * prior) / (work + prior) for s, work in zip(self._seconds, self._work, strict=True)]
