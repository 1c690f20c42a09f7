"""Facts of the clients that the server knows before a round: samples, capacity, local epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.seeds import generator

_T = TypeVar("_T")


@dataclass(frozen=True)
class About:
    """What the server knows of a client in one round."""

    num_examples: int
    """Number of training samples."""
    capacity: float
    """Share of the full model that the client can train, in (0, 1]."""
    local_epochs: int | None = None
    """Number of local epochs; None = `trainer.max_epochs`."""


class AllAbout(Protocol):
    """Facts of all clients, each found when it is asked for."""

    def of(self, client: int, round: int) -> About:
        """Return the facts of a client in a round."""
        ...

    def available_from(self, client: int, at: float) -> float:
        """Return the first simulated time, not before another one, at which a client is available."""
        ...


class AboutClients:
    """Facts of all clients by the options of a federation; what is drawn depends on seed, round and client.

    Args:
        federation: Options of the federation.
        num_examples: Function that returns the number of a client's training samples.
        num_clients: Number of clients of the data.
        seed: Random seed of the run.
    """

    def __init__(self, federation: Federation, num_examples: Callable[[int], int], num_clients: int, seed: int) -> None:
        self._num_examples, self._seed = num_examples, seed
        self._redraws_capacities = federation.redraw_capacities
        self._redraws_epochs = federation.redraw_local_epochs
        self._capacities = federation.fleet_capacities(num_clients, seed)
        self._epochs = federation.fleet_epochs(num_clients, seed)
        self._availability = federation.availability
        self._intervals = federation.fleet_intervals(num_clients, seed)

    def of(self, client: int, round: int) -> About:
        """See :class:`AllAbout`."""
        return About(self._num_examples(client), self._capacity(client, round), self._local_epochs(client, round))

    def available_from(self, client: int, at: float) -> float:
        """See :class:`AllAbout`."""
        if self._availability is None or self._intervals is None:
            return at
        return self._availability.next_time(self._intervals[client], at)

    def _capacity(self, client: int, round: int) -> float:
        if not self._redraws_capacities:
            return self._capacities[client]
        return self._drawn(self._capacities.levels, client, round, "capacity")

    def _local_epochs(self, client: int, round: int) -> int | None:
        if self._epochs is None:
            return None
        redraws = self._redraws_epochs
        entry = self._drawn(self._epochs.levels, client, round, "epochs entry") if redraws else self._epochs[client]
        low, high = entry
        return self._drawn(range(low, high + 1), client, round, "local epochs")

    def _drawn(self, levels: Sequence[_T], client: int, round: int, use: str) -> _T:
        if len(levels) == 1:
            return levels[0]
        rng = generator(self._seed, round, client, use)
        return levels[int(torch.randint(len(levels), (), generator=rng))]
