"""The draw of a round's clients by the sampler of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from lightning_sparsefl.errors import InvalidOption, is_whole
from lightning_sparsefl.federated.aggregation.noise import KeyStream, derive_key
from lightning_sparsefl.federated.exchange.hook_results import check_result
from lightning_sparsefl.federated.sampling.draws import drawn, within
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, SamplerState, Uniform
from lightning_sparsefl.seeds import generator


@dataclass(frozen=True)
class CohortDraw:
    """Draws the clients of each round: from the seed, or in a private run from the secret key.

    Epsilon assumes that nobody knows who took part, and a seed is stored in configurations and checkpoints.
    """

    clients: Sequence[int]
    """Clients to draw from."""
    wanted: int
    """Number of clients that are merged in a round."""
    seed: int
    """Random seed of the run."""
    sampler: CohortSampler = field(default_factory=Uniform)
    """Rule of the draw."""
    secret: Callable[[], bytes] | None = None
    """Function that returns the secret key; None = draw from the seed."""

    timed: bool = False
    """Whether clients are drawn among those that are available at the simulated time of a round."""

    def needed(self, state: SamplerState, candidates: Candidates) -> int:
        """Return the number of updates that a round waits for.

        Args:
            state: State of the sampler before the round.
            candidates: Facts of the clients, without late ones in `count`.

        Raises:
            InvalidOption: If the sampler needs no update, or more than clients are to be drawn.
        """
        found = self.sampler.needed(state, candidates)
        if not is_whole(found, 1) or found > candidates.count:
            raise InvalidOption(
                f"`{type(self.sampler).__name__}.needed` returned {found!r} in round {candidates.round}; expected a "
                f"whole number from 1 to {candidates.count}, the number of clients to draw."
            )
        return int(found)

    def widened(self, needed: int, present: int) -> int:
        """Return the number of clients to draw, late ones included.

        Args:
            needed: Number of updates that the round waits for.
            present: Number of clients to draw from.
        """
        return min(math.ceil(self.sampler.over_select * needed - 1e-9), present)

    @property
    def learns(self) -> bool:
        """Whether a cohort depends on the rounds before."""
        return self.timed or type(self.sampler).learn is not CohortSampler.learn

    def draw(self, run: str, state: SamplerState, candidates: Candidates) -> list[int]:
        """Return the numbers of a round's clients in ascending order.

        Args:
            run: Identifier of the run, used with the secret key.
            state: State of the sampler before the round.
            candidates: Clients to draw from, and what is known of them.

        Raises:
            InvalidOption: If the sampler draws a client twice, one that does not train, or another number of clients.
        """
        round = candidates.round
        if self.secret is not None:
            below = KeyStream(derive_key(self.secret(), ("cohort", run, round))).below
            return drawn(self.clients, self.wanted, below)
        clients = self.sampler.draw(state, candidates, generator(self.seed, round, "cohort"))
        check_result(self.sampler, "draw", clients, Iterable)
        found = [self._number(client, round) for client in clients]
        fits = len(found) == len(set(found)) == candidates.count and all(within(candidates.clients, c) for c in found)
        if not fits:
            raise InvalidOption(
                f"`federation.sampler` is {self.sampler}, which drew the clients {found[:20]} in round {round}; "
                f"expected {candidates.count} different ones of the {len(candidates.clients)} that train."
            )
        return sorted(found)

    def _number(self, client: Any, round: int) -> int:
        """Return the number of a client, which may be that of NumPy or torch."""
        try:
            return index(client)
        except TypeError:
            name = type(self.sampler).__name__
            raise InvalidOption(
                f"`{name}.draw` returned {client!r} among the clients of round {round}; expected whole numbers."
            ) from None
