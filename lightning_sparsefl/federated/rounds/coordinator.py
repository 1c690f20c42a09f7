"""One round: who takes part, what is merged, what it cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.errors import ClientFailed
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.federated.distributed.rank_consistency import idle
from lightning_sparsefl.federated.exchange.orders import Split, Task
from lightning_sparsefl.federated.local.round_lr import RoundLR, checked_factor
from lightning_sparsefl.federated.rounds.about import About
from lightning_sparsefl.federated.rounds.cohort import Cohort, Plan, ServerWork
from lightning_sparsefl.federated.rounds.merge_policy import MergePolicy
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.rounds.round_metrics import late_metrics, round_metrics, spread
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.types import Merged, Message, RunState


@dataclass(frozen=True)
class RoundResult:
    """A finished round."""

    state: RunState
    """State after the round."""
    outcomes: Sequence[Outcome]
    """Outcomes of all participants, those that were late or failed included, by client."""
    metrics: Mapping[str, float]
    """The round's logged keys, besides scores and the ledger's."""

    def to_plain(self) -> dict[str, Any]:
        """Return what is logged of the round, as plain values."""
        return {"outcomes": [outcome.to_plain() for outcome in self.outcomes], "metrics": dict(self.metrics)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], state: RunState) -> RoundResult:
        """Restore a round.

        Args:
            plain: Values from :meth:`to_plain`.
            state: State after the round.
        """
        return cls(state, [Outcome.from_plain(outcome) for outcome in plain["outcomes"]], dict(plain["metrics"]))


class Coordinator:
    """Runs rounds: the same code on every rank, and the same state after each.

    Args:
        server: The server's half.
        cohort: Carries out the orders.
        merging: How updates are merged.
        round_lr: Schedule of the learning rates over rounds, which the nodes apply.
    """

    def __init__(self, server: Server, cohort: Cohort, merging: MergePolicy, round_lr: RoundLR | None = None) -> None:
        self.server, self.cohort, self.merging, self.round_lr = server, cohort, merging, round_lr
        self.federation, self.ledger = server.federation, server.ledger

    def round(self, state: RunState, score_after: Split | None = None) -> RoundResult:
        """Run one round: sample, download, train, upload and merge.

        Args:
            state: State before the round.
            score_after: Split that participants are scored on right after their training; None = not scored.

        Raises:
            ClientFailed: If a client fails and `federation.on_client_error` is ``raise``, or too few are left.
            InvalidOption: If the schedule of the learning rates has no factor for the round.
            Interrupted: If a signal asks to stop; the round has left no trace then.
        """
        started = time.perf_counter()
        if self.round_lr is not None:  # here first, since an error in the work of a client would be the client's
            checked_factor(self.round_lr, state.server.round, self.server.max_rounds)
        drawn = self.server.draw.cohort(state)
        clients, late = drawn.trained, drawn.late
        merge = self.merging.start(state, self._total_weight(clients))
        splits = () if score_after is None else (score_after,)
        outcomes = self.cohort.run(
            self._plan(state, clients, "train"),
            lambda client, forgotten: self.server.order(state, client, "train", splits, forgotten=forgotten),
            partial(self.server.receive, late=frozenset(late)),
            merge,
        )
        assert [outcome.client for outcome in outcomes] == clients, "every client is placed on exactly one rank"
        trained = self._survivors(state, outcomes)
        trained_at = time.perf_counter()
        reports = {outcome.client: outcome.report for outcome in trained}
        arrived = self.server.draw.arrived(state, trained, drawn.start)
        merged = self.merging.result(merge, reports, state, arrived)
        left_out = [self.server.late(state, client) for client in late if not self.server.draw.merges_late]
        kept = [outcome for outcome in outcomes if outcome.status == "late"]
        outcomes = sorted([*outcomes, *left_out], key=lambda outcome: outcome.client)
        closed = self.server.close(state, merged, outcomes, drawn.start)
        self._charge(left_out)
        self.cohort.settle([*trained, *kept])
        waited = self.cohort.confirm(closed.state, closed.observed)
        after = {o.client: o.scores[score_after] for o in trained} if score_after is not None else {}
        metrics = {
            **self._metrics(closed.state, outcomes, len(arrived)),
            **spread("personal_after", after),
            **self.merging.metrics(closed.state.server.round),
            "mask/coverage_min": merge.coverage_min(len(trained)),
            **idle(waited),
            "time/aggregate": time.perf_counter() - trained_at,
            "time/round": time.perf_counter() - started,
        }
        return RoundResult(closed.state, outcomes, metrics)

    def _metrics(self, state: RunState, outcomes: Sequence[Outcome], arrived: int) -> dict[str, float]:
        """Return what is logged of the clients of a round; of late ones and of the clock where there are any.

        Args:
            state: State after the round.
            outcomes: Outcomes of all participants.
            arrived: Number of late updates of rounds before that were merged.
        """
        draw, metrics = self.server.draw, round_metrics(outcomes, self.server.layout)
        if draw.over_selects:
            metrics |= late_metrics(outcomes)
        if draw.merges_late:
            metrics["clients/arrived"] = arrived
        if draw.follows_clock:
            metrics["time/clock"] = state.seconds
        return metrics

    def _charge(self, outcomes: Sequence[Outcome]) -> None:
        """Add the charges of clients to the ledger; a client that no message has reached has none."""
        for outcome in outcomes:
            if outcome.charge is not None:
                self.ledger.add(outcome.charge)

    def stack_of(self, state: RunState, client: int) -> tuple[int, ...]:
        """Return the clients of a round that train together with one of them, itself included.

        Args:
            state: State before the round.
            client: Number of the client.
        """
        plan = self._plan(state, self.server.draw.cohort(state).trained, "train")
        return next(stack for stack in self.cohort.stacks(plan) if client in stack)

    def survey(self, state: RunState, clients: Sequence[int], message: Message) -> Merged:
        """Ask clients a question before round 0, and merge what they answer, weighted as their updates say.

        The bytes are charged to the first round.

        Args:
            state: State before round 0, with the initial weights.
            clients: Numbers of the clients.
            message: Message that every client receives.
        """
        merge = CoverageMean().start(self.server.layout, state.server.weights, self._total_weight(clients))
        outcomes = self.cohort.run(
            self._plan(state, clients, "survey"),
            lambda client, _: self.server.order(state, client, "survey", message=message),
            self.server.receive,
            merge,
        )
        answered = self._survivors(state, outcomes)
        self._charge(answered)
        return merge.result({outcome.client: outcome.metrics for outcome in answered})

    def evaluate(
        self,
        state: RunState,
        clients: Sequence[int],
        split: Split,
        task: Task = "score",
        server_work: ServerWork | None = None,
        round: int | None = None,
    ) -> list[Outcome]:
        """Score clients.

        Args:
            state: State of the run.
            clients: Numbers of the clients.
            split: Split to score.
            task: ``score``, or ``finetune`` to score after a last local fit.
            server_work: Work of the server itself, such as scoring the global model.
            round: Number of the round that clients work in; None = the one that the state stands before.

        Returns:
            One outcome for each client that could be scored, and that of the server's work, by client.

        Raises:
            ClientFailed: If a client fails and `federation.on_client_error` is ``raise``.
        """
        outcomes = self.cohort.run(
            self._plan(state, clients, task, server_work),
            lambda client, forgotten: self.server.order(
                state, client, task, (split,), round=round, forgotten=forgotten
            ),
            self.server.receive,
            None,
        )
        at = state.server.round
        for lost in (outcome for outcome in outcomes if outcome.status == "failed"):
            if self.federation.on_client_error == "raise":
                raise ClientFailed(lost.failure or "", client=lost.client, round=at, rank=lost.rank, during="scoring")
            rank_zero_info(f"Client {lost.client} has no scores in round {at}: {lost.failure}")
        return [outcome for outcome in outcomes if outcome.status != "failed"]

    def _plan(self, state: RunState, clients: Sequence[int], task: Task, server_work: ServerWork | None = None) -> Plan:
        at, trains = state.server.round, task == "train"
        facts = {client: self.server.about.of(client, at) for client in clients}
        versions = {client: self.server.node_version(client, at) for client in clients}
        return Plan(
            task=task,
            round=None if task == "survey" else at,
            loads={i: _training_load(a) if trains else float(a.num_examples) for i, a in facts.items()},
            versions={client: version for client, version in versions.items() if version is not None},
            alike=self.server.alike(state.server, clients) if trains else None,
            server_work=server_work,
        )

    def _total_weight(self, clients: Sequence[int]) -> int:
        """Return an upper bound of the updates' summed weights."""
        return max(sum(self.server.about.of(client, 0).num_examples for client in clients), len(clients))

    def _survivors(self, state: RunState, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes that are merged; charge the others for their download.

        Raises:
            ClientFailed: If a failure ends the run, or too few clients are left.
        """
        trained = [outcome for outcome in outcomes if outcome.status == "counted"]
        failed = [outcome for outcome in outcomes if outcome.status == "failed"]
        enough = len(trained) >= self.federation.min_clients
        if failed and (self.federation.on_client_error == "raise" or not enough):
            first, round = failed[0], state.server.round
            left = (len(trained), self.federation.min_clients) if self.federation.on_client_error == "skip" else None
            raise ClientFailed(first.failure or "", client=first.client, round=round, rank=first.rank, left=left)
        self._charge(failed)
        for outcome in failed:
            rank_zero_info(f"Client {outcome.client} is left out of round {state.server.round}: {outcome.failure}")
        return trained


def _training_load(about: About) -> float:
    """Return a number in proportion to the work of a client's training."""
    return float(about.num_examples) * about.capacity * (about.local_epochs or 1)
