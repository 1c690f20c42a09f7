"""The clients of a round: those that are free at its start, those that are drawn, and those that come too late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.hook_results import check_plain
from lightning_sparsefl.federated.rounds.about import AllAbout
from lightning_sparsefl.federated.rounds.outcome import Outcome, longest
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.samplers import Candidates, SamplerState, Seen
from lightning_sparsefl.types import PendingUpdate, RunState


class Drawn(NamedTuple):
    """The clients that were drawn for a round, in ascending order."""

    trained: list[int]
    """Clients that train."""
    late: list[int]
    """Clients that the round does not wait for; they train if their updates are merged later."""
    start: float = 0.0
    """Simulated time at which the round starts: when a client is free."""


class RoundDraw:
    """Draws the clients of a round on the simulated clock.

    Args:
        cohorts: Cohorts by the sampler of the run.
        about: Facts of the clients.
        workload: Facts that the cost of local training depends on.
        seconds: Function of the state before a round and a client: the simulated time of the client's round; None if
            no times are simulated.
    """

    def __init__(
        self,
        cohorts: CohortDraw,
        about: AllAbout,
        workload: Workload,
        seconds: Callable[[RunState, int], float | None],
    ) -> None:
        self._cohorts, self._about, self._workload, self._seconds = cohorts, about, workload, seconds

    @property
    def clients(self) -> Sequence[int]:
        """Numbers of the clients to draw from."""
        return self._cohorts.clients

    @property
    def learns(self) -> bool:
        """Whether a cohort depends on the rounds before."""
        return self._cohorts.learns

    @property
    def over_selects(self) -> bool:
        """Whether more clients are drawn than a round waits for."""
        return self._cohorts.sampler.over_select > 1

    @property
    def merges_late(self) -> bool:
        """Whether the updates of late clients are merged in later rounds."""
        return self._cohorts.sampler.late_merge() is not None

    @property
    def follows_clock(self) -> bool:
        """Whether cohorts depend on simulated time."""
        return self.merges_late or self._cohorts.timed

    def cohort(self, state: RunState) -> Drawn:
        """Draw the clients of the round that a state stands before.

        Args:
            state: State before the round.

        Raises:
            InvalidOption: If the sampler does not draw as it should, or needs times that are not simulated.
        """
        start, free = self._free(state)
        candidates = self._candidates(state, free, start)
        wanted = self._cohorts.needed(state.sampler, candidates)
        candidates = replace(candidates, count=self._cohorts.widened(wanted, len(free)))
        found = self._cohorts.draw(state.run, state.sampler, candidates)
        if len(found) <= wanted and not self.follows_clock:
            return Drawn(found, [], start)
        fastest = sorted(found, key=lambda client: (self.expected_seconds(state, client), client))
        late = sorted(fastest[wanted:])
        return Drawn(found if self.merges_late else sorted(fastest[:wanted]), late, start)

    def require_times(self, state: RunState) -> None:
        """Check that the times of clients are known where a cohort depends on them.

        Args:
            state: State before the round.

        Raises:
            InvalidOption: If they are not.
        """
        if self.follows_clock or self.over_selects:
            self.cohort(state)

    def expected_seconds(self, state: RunState, client: int) -> float:
        """Return the expected time of a client's round, which decides who is late.

        Args:
            state: State before the round.
            client: Number of the client.

        Raises:
            InvalidOption: If it is not known.
        """
        seconds = self._seconds(state, client)
        if seconds is not None:
            return seconds
        why = "the FLOPs of the model cannot be counted" if self._workload.layers is None else "devices are not set"
        option, other = f"sampler.over_select` is {self._cohorts.sampler.over_select}", "`over_select: 1.0`"
        if self._cohorts.timed:
            option, other = "availability` is set", "`availability: null`"
        elif self.merges_late:
            option, other = f"sampler` is {self._cohorts.sampler}", "another sampler"
        raise InvalidOption(
            f"`federation.{option}, but no times of clients are simulated, since {why}; set `federation.devices`, "
            f"or {other}."
        )

    def arrived(self, state: RunState, outcomes: Sequence[Outcome], start: float) -> list[PendingUpdate]:
        """Return the pending updates that arrive before the end of a round, and are not too old.

        Args:
            state: State before the round.
            outcomes: Outcomes of the clients that were trained.
            start: Simulated time at which the round started.
        """
        rule, end = self._cohorts.sampler.late_merge(), start + longest(outcomes)
        arrived = [update for update in state.pending if update.has_arrived(end)]
        return [] if rule is None else rule.current(arrived, state.server.round)

    def learned(self, state: RunState, seen: Mapping[int, Seen], start: float) -> SamplerState:
        """Return the state of the sampler after a round.

        Args:
            state: State before the round.
            seen: Facts that the sampler learns about the clients of the round.
            start: Simulated time at which the round started.

        Raises:
            InvalidOption: If the sampler does not return a state.
        """
        candidates, sampler = self._candidates(state, self.clients, start), self._cohorts.sampler
        learned = sampler.learn(state.sampler, candidates, seen)
        check_plain(sampler, "learn", learned)
        return learned

    def _free(self, state: RunState) -> tuple[float, Sequence[int]]:
        """Return the first time at which a client is free, and all clients that are free then, in ascending order."""
        busy = {update.client: update.arrival for update in state.pending}
        if not busy and not self._cohorts.timed:
            return state.seconds, self.clients
        times = {client: max(state.seconds, busy.get(client, 0.0)) for client in self.clients}
        if self._cohorts.timed:
            times = {client: self._about.available_from(client, at) for client, at in times.items()}
        start = min(times.values())
        return start, [client for client, at in times.items() if at <= start]

    def _candidates(self, state: RunState, clients: Sequence[int], now: float) -> Candidates:
        return Candidates(
            round=state.server.round,
            clients=clients,
            count=min(self._cohorts.wanted, len(clients)),
            now=now,
            arrivals={update.client: update.arrival for update in state.pending},
            available=self._is_available if self._cohorts.timed else None,
            samples=lambda client: self._workload.samples(
                client, self._about.of(client, state.server.round).num_examples
            ),
            seconds=lambda client: self._seconds(state, client),
        )

    def _is_available(self, client: int, at: float) -> bool:
        return self._about.available_from(client, at) <= at
