"""Rules for sampling the clients of a round, the values of `federation.sampler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.sampling.draws import drawn, numbers_below

SamplerState: TypeAlias = Mapping[str, Any]
"""State of a sampler: numbers, strings, tensors, and lists and mappings of them, which checkpoints hold."""


@dataclass(frozen=True)
class Candidates:
    """What a sampler may know of the clients before a round."""

    round: int
    """Index of the round, from 0."""
    clients: Sequence[int]
    """Numbers of the clients to draw from, in ascending order."""
    count: int
    """Number of clients to draw, those by `over_select` included; at most all."""
    samples: Callable[[int], int]
    """Function that returns the number of training samples of one local epoch of a client."""
    seconds: Callable[[int], float | None]
    """Function that returns the expected time of a client-round on the client's device; None = not simulated."""
    now: float = 0.0
    """Simulated time in seconds since the start of the run."""
    arrivals: Mapping[int, float] = field(default_factory=dict)
    """Simulated times at which pending updates arrive, by client."""
    available: Callable[[int, float], bool] | None = None
    """Function that returns whether a client is available at a simulated time; None = always."""


@dataclass(frozen=True)
class Seen:
    """What a sampler learns from a round about one of its clients."""

    samples: int
    """Number of training samples of one local epoch."""
    counted: bool
    """Whether its update was merged; False for a client that was late or failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of its local fit."""
    seconds: float | None = None
    """Simulated time of the client-round."""


@dataclass(frozen=True, kw_only=True)
class CohortSampler(ABC):
    """Base class of rules for sampling the clients of a round.

    A sampler has no other state than what :meth:`start` and :meth:`learn` return. The cohort of a round is a function
    of the seed, the round and that state, which is part of the checkpoint and equal on all ranks.
    """

    over_select: float = 1.0
    """Factor >= 1 by which more clients are drawn than `federation.clients_per_round`. The fastest of them are trained
    and merged; the others are late: they are charged for their download and their FLOPs. A factor above 1 requires
    `federation.devices`, or an algorithm that simulates time."""

    def __post_init__(self) -> None:
        check_types(self, "federation.sampler.")
        require(1 <= self.over_select <= 10, "federation.sampler.over_select", self.over_select, "a number in [1, 10]")

    def start(self) -> SamplerState:
        """Return the state before the first round."""
        return {}

    def needed(self, state: SamplerState, candidates: Candidates) -> int:
        """Return the number of updates that a round waits for, at most and by default `candidates.count`.

        Args:
            state: State before the round.
            candidates: Facts of the clients, without the factor `over_select` in `count`.
        """
        return candidates.count

    def late_merge(self) -> StaleMean | None:
        """Return the rule by which the updates of late clients are merged in later rounds; None = they do not train."""
        return None

    @abstractmethod
    def draw(self, state: SamplerState, candidates: Candidates, rng: torch.Generator) -> Sequence[int]:
        """Draw the clients of a round.

        Args:
            state: State before the round.
            candidates: Clients to draw from, and what is known of them.
            rng: Generator whose seed follows from the seed of the run and the round.

        Returns:
            Numbers of different clients, as many as `candidates.count`.
        """

    def learn(self, state: SamplerState, candidates: Candidates, seen: Mapping[int, Seen]) -> SamplerState:
        """Return the state after a round; called on every rank with equal input.

        Args:
            state: State before the round.
            candidates: Facts of the clients before the round, those included that were not available.
            seen: Results of the round, by client.
        """
        return state

    def callbacks(self) -> list[Callback]:
        """Return client callbacks that log the metrics which the sampler learns from."""
        return []


@dataclass(frozen=True, kw_only=True)
class Uniform(CohortSampler):
    """Uniform sampling without replacement, from the seed and the round; with `privacy`, from its secret key."""

    def draw(self, state: SamplerState, candidates: Candidates, rng: torch.Generator) -> list[int]:
        """Draw the clients; see :class:`CohortSampler`."""
        return drawn(candidates.clients, candidates.count, numbers_below(rng))
