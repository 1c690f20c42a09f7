"""Who does the work of a round, and where it is added up."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Protocol

from lightning_sparsefl.errors import ClientFailed, InvalidOption, SparseFLError
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeaders, merge_headers
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.distributed.load_forecast import Job, LoadForecast
from lightning_sparsefl.federated.distributed.placement import longest_first, tickets
from lightning_sparsefl.federated.distributed.rank_consistency import check_ranks_agree
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.signals import Interrupts
from lightning_sparsefl.federated.distributed.stacks import compose_evaluations, compose_stacks
from lightning_sparsefl.federated.exchange.orders import Answer, Order, Task
from lightning_sparsefl.federated.rounds.about import AllAbout
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.storage.homed_records import HomedRecords
from lightning_sparsefl.types import RunState

MakeOrder = Callable[[int, bool], Order]
"""Makes the order of a client; the second argument says that its node has lost its record."""
Receive = Callable[[Sequence[Order], Sequence[Answer], Accumulator | None], list[Outcome]]
"""The server's :meth:`~lightning_sparsefl.federated.rounds.server.Server.receive`."""


_PHASES: Mapping[Task, Literal["training", "survey", "scoring"]] = {
    "train": "training",
    "survey": "survey",
    "score": "scoring",
    "finetune": "scoring",
}
"""Phase of a run that each task belongs to."""


class Answers(Protocol):
    """A node, in this process or behind bytes."""

    def answer(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Carry out orders of different clients, and yield one answer for each."""
        ...


@dataclass(frozen=True)
class ServerWork:
    """Work of the server itself, which the processes do along with that of the clients."""

    work: Callable[[], Outcome]
    """Does the whole work in one process; its outcome stands among those of the clients."""
    load: float
    """Load of the work, in the unit of the clients' loads."""
    part: Callable[[int, int], Any] | None = None
    """Does one of several equal parts, given its number and theirs; None = one process does the whole work."""
    join: Callable[[Sequence[Any]], Outcome | None] = lambda parts: None
    """Makes the outcome of the parts' results in their order; None = one process has to do the whole work."""


@dataclass(frozen=True)
class Plan:
    """The work of one phase of a round."""

    task: Task
    """What the clients do."""
    loads: Mapping[int, float]
    """Numbers in proportion to each client's work, such as its samples."""
    versions: Mapping[int, int]
    """Version of the node's record of each client that has one."""
    round: int | None = None
    """Number of the round before which the state stands; None before the first one."""
    alike: Mapping[int, Hashable] | None = None
    """What the clients of a stack have in common; None = all may train together."""
    server_work: ServerWork | None = None
    """Work of the server itself."""

    @property
    def name(self) -> str:
        """Name of the phase; no two phases of training have the same."""
        return self.task if self.round is None else f"{self.task} {self.round}"

    @property
    def trains(self) -> bool:
        """Whether the load forecast applies to the work and learns from it."""
        return self.task == "train"

    @property
    def fits(self) -> bool:
        """Whether the work contains local fits, so that clients may train together."""
        return self.task in ("train", "finetune")

    @property
    def scores(self) -> bool:
        """Whether the work is an evaluation alone, so that clients may be evaluated together."""
        return self.task == "score"


class Cohort(Protocol):
    """Carries out the orders of a phase, wherever the clients are."""

    interrupts: Interrupts
    """Signals that ask to stop, which :meth:`run` looks at."""
    watch: Callable[[str, int, int], None] | None
    """Function that is called before the first client and after each one, with the name of the plan, and the numbers
    of finished clients and of all clients of this process."""

    def about(self) -> AllAbout:
        """Return sizes and capacities of the clients."""
        ...

    def stacks(self, plan: Plan) -> list[tuple[int, ...]]:
        """Return the clients that work together, on whose company the bits of their results may depend.

        Args:
            plan: Clients and their loads.
        """
        ...

    def run(self, plan: Plan, order: MakeOrder, receive: Receive, merge: Accumulator | None) -> list[Outcome]:
        """Have orders made, answered and received; add what was received in `merge`, over all processes.

        Args:
            plan: Clients and their loads. An order is made where and when it is answered, so that messages are never
                in memory all at once.
            order: Function that makes the order of a client.
            receive: Checks answers, charges them and adds them to a sum.
            merge: Sum of this process; complete on all processes afterwards. None = nothing is added.

        Returns:
            One outcome for each client, by client, the same on all processes.
        """
        ...

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Let the nodes keep the records that a phase has made."""
        ...

    def confirm(self, state: RunState, observed: Mapping[int, Any]) -> list[float]:
        """Compare the states that the processes have computed.

        Returns:
            Seconds that each process waited for the others in the round.
        """
        ...


class RankCohort:
    """Clients spread over the processes of a run; each process answers its share with a node of its own.

    Args:
        ranks: Processes of the run.
        node: This process's node.
        records: Records that the node works with.
        about: Sizes and capacities of the clients.
        placement: Option `federation.placement`.
        raises: Whether a client's failure ends the run at once, where this is the only process.
        stack_size: Largest number of clients that train together (`federation.stack_size`).
        score_size: Function of the number of clients that are scored: how many of them are evaluated together.
    """

    def __init__(
        self,
        ranks: Ranks,
        node: Answers,
        records: HomedRecords,
        about: AllAbout,
        placement: Literal["static", "dynamic"] = "static",
        raises: bool = True,
        stack_size: int = 1,
        score_size: Callable[[int], int] = lambda clients: 1,
    ) -> None:
        self.ranks, self.node, self.records = ranks, node, records
        self.placement, self.raises, self.stack_size, self._score_size = placement, raises, stack_size, score_size
        self.interrupts = Interrupts()
        self.forecast = LoadForecast(ranks.size)
        self._about = about
        self.watch: Callable[[str, int, int], None] | None = None

    def about(self) -> AllAbout:
        """Return sizes and capacities of the clients."""
        return self._about

    def run(self, plan: Plan, order: MakeOrder, receive: Receive, merge: Accumulator | None) -> list[Outcome]:
        """Work through a plan; see :class:`Cohort`.

        Raises:
            ClientFailed: If a client fails, this is the only process, and failures end the run.
            InvalidOption: If an option does not fit the work of a client, as it would not that of the others.
            Interrupted: If a signal asks to stop; the phase has left no trace then.
        """
        loads = self.forecast.loads(plan.loads) if plan.trains else plan.loads
        mine = self._assigned(plan, loads)
        done = self.ranks.share(lambda: self._work(plan, mine, order, receive, merge))
        outcomes = [outcome for worked, *_ in done for outcome in worked]
        if plan.server_work is not None and self._divides(plan.server_work):
            outcomes.append(self._joined(plan.server_work, [part for *_, part in done]))
        outcomes.sort(key=lambda outcome: outcome.client)
        if merge is not None:
            merge.all_reduce(self.ranks.sum, merge_headers(headers for _, headers, _ in done))
            merge.collect(self.ranks.gather)
        if plan.trains:
            counted = [outcome for outcome in outcomes if outcome.status == "counted" and outcome.charge]
            self.forecast.learn(Job(o.client, o.rank, o.charge.flops_train, o.elapsed) for o in counted if o.charge)
        return outcomes

    def stacks(self, plan: Plan) -> list[tuple[int, ...]]:
        """Return stacks where clients train or are scored, else each client for itself; see :class:`Cohort`."""
        if plan.scores:
            return compose_evaluations(plan.loads, self._score_size(len(plan.loads)))
        return compose_stacks(plan.loads, self.stack_size if plan.fits else 1, plan.alike)

    def _assigned(self, plan: Plan, loads: Mapping[int, float]) -> Iterable[Sequence[int]]:
        """Return this rank's stacks, once the records of their clients are here."""
        dynamic = self.placement == "dynamic" and plan.trains and self.ranks.size > 1
        pace = self.forecast.seconds_per_flop if plan.trains else None
        reserved = 0.0 if plan.server_work is None or self._divides(plan.server_work) else plan.server_work.load
        stacks = {stack[0]: stack for stack in self.stacks(plan)}
        work = {first: sum(loads[client] for client in stack) for first, stack in stacks.items()}
        if dynamic:
            self.records.fetch(plan.versions, None)
            return map(stacks.__getitem__, tickets(work, self.ranks, plan.name))
        shares = longest_first(work, self.ranks.size, pace, reserved)
        self.records.fetch(plan.versions, [[c for first in share for c in stacks[first]] for share in shares])
        return [stacks[first] for first in shares[self.ranks.rank]]

    def _work(
        self, plan: Plan, stacks: Iterable[Sequence[int]], order: MakeOrder, receive: Receive, merge: Accumulator | None
    ) -> tuple[list[Outcome], SumHeaders, Any]:
        """Work through this rank's stacks, until a signal asks to stop; return what all ranks must know."""
        total, done = len(plan.loads), 0
        if isinstance(stacks, Sequence):  # planned; from a queue, any of the clients may come here
            total = sum(map(len, stacks))
        if self.watch is not None:
            self.watch(plan.name, done, total)
        outcomes, part = ([], None) if plan.server_work is None else self._start_server_work(plan.server_work)
        self.interrupts.check()
        for clients in stacks:
            try:
                outcomes += self._stack(clients, order, receive, merge)
            except Exception:
                self.interrupts.check()  # a signal that also ended a loader's workers is no failure of the client
                raise
            self.interrupts.check()
            done += len(clients)
            if self.watch is not None:
                self.watch(plan.name, done, total)
        return outcomes, {} if merge is None else merge.headers(), part

    def _divides(self, server_work: ServerWork) -> bool:
        """Return whether each rank does a part of the server's own work."""
        return server_work.part is not None and self.ranks.size > 1

    def _start_server_work(self, server_work: ServerWork) -> tuple[list[Outcome], Any]:
        """Do what is this rank's of the server's own work: return its outcome, and the result of a part."""
        if server_work.part is not None and self._divides(server_work):
            return [], server_work.part(self.ranks.rank, self.ranks.size)
        return [server_work.work()] if self.ranks.first else [], None

    def _joined(self, server_work: ServerWork, parts: Sequence[Any]) -> Outcome:
        """Return the outcome of the parts, or that of the whole work if they do not make it."""
        outcome = server_work.join(parts)
        if outcome is None:
            outcome = self.ranks.share(lambda: server_work.work() if self.ranks.first else None)[0]
        assert outcome is not None, "the first rank has done the work"
        return outcome

    def _stack(
        self, clients: Sequence[int], make: MakeOrder, receive: Receive, merge: Accumulator | None
    ) -> list[Outcome]:
        orders = [make(client, False) for client in clients]
        answers = list(self.node.answer(orders))
        lost = [place for place, answer in enumerate(answers) if answer.forgot]
        if lost:
            again = [make(clients[place], True) for place in lost]
            for place, order, answer in zip(lost, again, self.node.answer(again), strict=True):
                orders[place], answers[place] = order, answer
        for order, answer in zip(orders, answers, strict=True):
            if answer.error is None:
                continue
            ends = order.task == "survey" or (self.raises and self.ranks.size == 1)
            if ends or isinstance(answer.error, InvalidOption):
                raise_failure(order, answer, answer.error, self.ranks.rank)
            if not isinstance(answer.error, ClientFailed):
                traceback.print_exception(answer.error)  # it cannot travel to the other processes
        rank = self.ranks.rank
        return [o if o.rank == rank else replace(o, rank=rank) for o in receive(orders, answers, merge)]

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Send the records that a phase has made to their homes; see :class:`Cohort`."""
        self.records.settle({o.client: o.rank for o in outcomes if o.status != "failed" and o.version is not None})

    def confirm(self, state: RunState, observed: Mapping[int, Any]) -> list[float]:
        """Compare the ranks' states by checksums; see :class:`Cohort`.

        Raises:
            RanksDisagree: If a rank holds another state than rank 0.
        """
        pending = [vars(update) for update in state.pending]
        further = {"sampler": state.sampler, "seconds": state.seconds, "pending": pending}
        return check_ranks_agree(state.server, observed, self.ranks, further)


def raise_failure(order: Order, answer: Answer, error: BaseException, rank: int) -> NoReturn:
    """Raise the error behind a failed answer.

    Args:
        order: The order.
        answer: Answer to the order.
        error: Error of the client's work.
        rank: Process that did the work.

    Raises:
        ClientFailed: If the user's code failed; its cause is that error.
    """
    if isinstance(error, SparseFLError):
        raise error  # a failed client, or a mistake that every client would meet
    reason, during = answer.failure or "", _PHASES[order.task]
    raise ClientFailed(reason, client=order.client, round=order.round, rank=rank, during=during) from error
