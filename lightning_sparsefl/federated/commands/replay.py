"""Runs one local fit again, from the state that a round started from, in this process; nothing is written."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import voted
from lightning_sparsefl.federated.commands.client_number import client_number
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.fleet import names_of
from lightning_sparsefl.federated.rounds.cohort import RankCohort, raise_failure
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.storage.checkpoint import Checkpoint
from lightning_sparsefl.federated.storage.records import NodeRecord
from lightning_sparsefl.report import print_table
from lightning_sparsefl.report.tables import quantity
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.types import Message, RunState, Update


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
    """What the fit measured and cost."""
    seconds: float
    """Wall-clock duration of the fit."""

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
        """Return names and values for a table."""
        votes, sent = counts(voted(self.update, self.message)), self.update.weights
        kept = sum(votes.get(name, tensor.numel()) for name, tensor in sent.items())
        charge = self.outcome.charge
        assert charge is not None
        merged = [
            (f"norm of the update ({self.update.kind})", f"{self.norm:.6g}"),
            ("weights it votes on", f"{kept} of {sum(tensor.numel() for tensor in self.message.weights.values())}"),
        ]
        return [
            *((f"local {name}", f"{value:.6g}") for name, value in sorted(self.outcome.metrics.items())),
            ("training samples", str(self.outcome.num_examples)),
            *(merged if sent else ()),
            ("its weight in the merge", str(self.update.weight)),
            ("bytes down", quantity(charge.downlink_bytes, "B")),
            ("bytes up", quantity(charge.uplink_bytes, "B")),
            ("seconds", f"{self.seconds:.3g}"),
        ]

    def print(self) -> None:
        """Print a table on the terminal."""
        print_table(f"Client {self.outcome.client} in round {self.round}, again", ("", ""), self.rows())


def replay(run: Run, client: int | str, round: int | None = None) -> Replay:
    """Run one client's local fit of a round again; nothing is written.

    Args:
        run: Parts of the run, on one rank.
        client: Number or name of the client.
        round: Number of the round; None = the one after the checkpoint, or the last one of a finished run. Rounds in
            between are run first. A round before the last checkpoint starts from the previous one.

    Raises:
        InvalidOption: If the round cannot be reached from a checkpoint, or the client does not train in it.
    """
    asked = client_number(run.data, client)
    state, number = _state_before(run, round)
    if not run.server.draw.learns:
        _check_client(run, state, asked, number)
    state = _repeat_rounds(run, state, number)
    _check_client(run, state, asked, number)
    again = _replay_client(run, state, asked)
    again.print()
    return again


def _repeat_rounds(run: Run, state: RunState, number: int) -> RunState:
    """Return the state before a round, with the rounds up to it repeated."""
    first = state.server.round

    def watch(phase: str, done: int, clients: int) -> None:
        passed, rounds = state.server.round - first, number - first
        run.phases.show("rounds before", passed * clients + done, rounds * clients, "client-rounds")

    run.cohort.watch = watch
    with run.cohort.interrupts:
        while state.server.round < number:
            state = run.coordinator.round(state).state
    return state


def _state_before(run: Run, round: int | None) -> tuple[RunState, int]:
    """Return a state of the run from which a round can be reached, and the round.

    The state is that of the checkpoint, or of the previous one.
    """
    state, checkpoint = run.start()
    number = _next_or_last(run, state, checkpoint) if round is None else round
    if _within(run, state, number):
        return state, number
    rewound = run.resume_point.rewound()
    if rewound is not None:
        run.resume_point = rewound
        state, _ = run.start()
        if _within(run, state, number):
            rank_zero_info(f"Starting from {rewound.checkpoint}, the state before round {state.server.round}.")
            return state, number
    first, last = state.server.round, run.options.max_rounds - 1
    there = f"{first} to {last}" if first < last else str(last) if first == last else "none, since it has finished"
    raise InvalidOption(
        f"`round` is {number}, but the rounds that can be replayed from this checkpoint are: {there}; to replay "
        "others, keep checkpoints of earlier rounds with `ModelCheckpoint(save_top_k=-1)` in `trainer.callbacks`, and "
        "set `ckpt_path` to one of them."
    )


def _next_or_last(run: Run, state: RunState, checkpoint: Checkpoint | None) -> int:
    """Return the next round of a run, or the last one if it has ended."""
    options, rounds = run.options, state.server.round
    ended = checkpoint is not None and (rounds >= options.max_rounds or options.stops_again(checkpoint.stopped_by))
    return rounds - 1 if ended else rounds


def _within(run: Run, state: RunState, number: int) -> bool:
    return state.server.round <= number < run.options.max_rounds


def _replay_client(run: Run, state: RunState, client: int) -> Replay:
    """Make the order, have it answered, and receive the answer, which no sum takes."""
    started = time.perf_counter()
    stack = run.coordinator.stack_of(state, client)
    orders = [run.server.order(state, each) for each in stack]
    place = stack.index(client)
    assert isinstance(run.cohort, RankCohort)
    order, answer = orders[place], list(run.cohort.node.answer(orders))[place]
    if answer.error is not None:
        raise_failure(order, answer, answer.error, run.ranks.rank)
    (outcome,) = run.server.receive([order], [answer], None)
    assert answer.update is not None
    packed = run.visiting.staged(client)
    memory = None if packed is None else NodeRecord.from_plain(packed, client, run.device).memory
    update, seconds = replace(answer.update, memory=memory), time.perf_counter() - started
    return Replay(state.server.round, order.message, update, outcome, seconds)


def _check_client(run: Run, state: RunState, client: int, round: int) -> None:
    """Raise :class:`InvalidOption` unless a client trains in a round."""
    if run.federation.privacy is not None and run.resume_point.checkpoint is None:
        raise InvalidOption(
            "`ckpt_path` is not set; expected a checkpoint of the run, since cohorts and noise of a private run depend "
            "on its random identifier."
        )
    cohort = run.server.draw.cohort(replace(state, server=replace(state.server, round=round))).trained
    if client not in cohort:
        names = names_of(run.data)
        listed = ", ".join(_named(each, names) for each in cohort[:20]) + (", ..." if len(cohort) > 20 else "")
        raise InvalidOption(
            f"`client` is {_named(client, names)}, which does not train in round {round}; expected one of {listed}."
        )


def _named(client: int, names: Sequence[str]) -> str:
    """Return the number of a client, with its name if it has one."""
    return f"{client} ({names[client]})" if 0 <= client < len(names) else str(client)


def replay_command(error: ClientFailed, folder: Path, last: Path) -> str:
    """Return the command, or for Python the call, that runs a failed client's local fit again.

    Args:
        error: Failure, with its client and round.
        folder: Folder of the run; a configuration is in it if the command line started it.
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
