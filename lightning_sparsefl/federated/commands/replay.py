"""One local fit again: from the state a round started from, in this process, with nothing written."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import voted
from lightning_sparsefl.federated.rounds.coordinator import Outcome
from lightning_sparsefl.report import print_table
from lightning_sparsefl.report.tables import quantity
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.types import Message, ServerState, Update

if TYPE_CHECKING:
    from lightning_sparsefl.federated.commands.run import Session


@dataclass
class _Kept:
    """Stands where a round's sum stands, and keeps the one update."""

    arrived: list[tuple[Update, Message]] = field(default_factory=list)

    def add(self, update: Update, message: Message, num_examples: int) -> None:
        self.arrived.append((update, message))


@dataclass(frozen=True)
class Replay:
    """A local fit that was run again."""

    round: int
    """Number of the round, from 0."""
    message: Message
    """What the client received."""
    update: Update
    """What the server would merge; its `memory` is what the client would keep."""
    outcome: Outcome
    """What it measured and cost."""
    seconds: float
    """By the clock."""

    @property
    def norm(self) -> float:
        """Euclidean length of the change that the client votes for, over all it sends."""
        votes, total = voted(self.update, self.message), 0.0
        for name, tensor in self.update.weights.items():
            change = tensor.double()
            if self.update.kind == "weights" and name in self.message.weights:
                change = change - self.message.weights[name].double()
            total += float((change * votes[name] if name in votes else change).square().sum())
        return math.sqrt(total)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, for a table."""
        votes, sent = counts(voted(self.update, self.message)), self.update.weights
        kept = sum(votes.get(name, tensor.numel()) for name, tensor in sent.items())
        charge = self.outcome.charge
        assert charge is not None
        return [
            *((f"local {name}", f"{value:.6g}") for name, value in sorted(self.outcome.metrics.items())),
            ("training samples", str(self.outcome.num_examples)),
            (f"norm of the update ({self.update.kind})", f"{self.norm:.6g}"),
            (
                "weights it votes on",
                f"{kept} of {sum(tensor.numel() for tensor in self.message.weights.values())} sent",
            ),
            ("its weight in the merge", str(self.update.weight)),
            ("bytes down", quantity(charge.downlink_bytes, "B")),
            ("bytes up", quantity(charge.uplink_bytes, "B")),
            ("seconds", f"{self.seconds:.3g}"),
        ]

    def print(self) -> None:
        """As a table on the terminal."""
        print_table(f"Client {self.outcome.client} in round {self.round}, again", ("", ""), self.rows())


def replay_client(session: Session, server: ServerState, client: int, round: int | None) -> Replay:
    """One client's local fit in a round.

    Args:
        session: Set up as for a fit, on one rank.
        server: The state before a round; where that is an earlier one, the rounds between are run again first.
        client: Number of the client.
        round: Of the fit; None = the one that `server` stands before.

    Raises:
        InvalidOption: If the round cannot be reached from the state, or the client does not train in it.
    """
    number = server.round if round is None else round
    _check(session, server.round, client, number)
    while server.round < number:
        server = session.coordinator.round(server).server
    kept, started = _Kept(), time.perf_counter()
    merge: Any = kept
    outcome = session.coordinator.attempt(server, client, merge)
    update, message = kept.arrived[0]
    return Replay(number, message, update, outcome, time.perf_counter() - started)


def _check(session: Session, first: int, client: int, round: int) -> None:
    last = session.trainer.max_rounds - 1
    if not first <= round <= last:
        there = f"{first} to {last}" if first <= last else f"none, since all {last + 1} are finished"
        raise InvalidOption(
            f"`round` is {round}, but this checkpoint is the state before round {first}; rounds that can be replayed "
            f"from it: {there} (`ckpt_path`)."
        )
    cohort = session.coordinator.cohort(round)
    if client not in cohort:
        listed = ", ".join(map(str, cohort[:20])) + (", ..." if len(cohort) > 20 else "")
        raise InvalidOption(f"`client` is {client}, which does not train in round {round}; expected one of {listed}.")


def replay_command(error: ClientFailed, folder: Path, last: Path) -> str:
    """How to run a failed client's local fit again: a command, or in Python a call.

    Args:
        error: Says which client and round.
        folder: Of the run; a configuration is in it if the command line started it.
        last: The checkpoint of the state before the round.
    """
    config = folder / "config.yaml"
    if not config.exists():
        return (
            f"trainer.replay(module, datamodule, ckpt_path={str(last)!r}, client={error.client}, round={error.round})"
        )
    words = ["sparsefl", "replay", "--config", config, "--ckpt_path", last]
    words += ["--round", error.round, "--client", error.client]
    return shlex.join(map(str, words))
