"""The cohort whose clients are on the nodes of a Flower deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_sparsefl.errors import SparseFLError
from lightning_sparsefl.federated.aggregation.exact_sum import merge_headers
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.signals import Interrupts
from lightning_sparsefl.federated.exchange.encoding import decode_answer, encode_order, order_header
from lightning_sparsefl.federated.exchange.orders import Answer, Order
from lightning_sparsefl.federated.local.wire_node import on_device
from lightning_sparsefl.federated.rounds.about import AllAbout
from lightning_sparsefl.federated.rounds.cohort import MakeOrder, Plan, Receive
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.types import RunState
from lightning_sparsefl.wire import Codec

from lightning_sparsefl_flower.directory import Directory
from lightning_sparsefl_flower.hello import agreement
from lightning_sparsefl_flower.link import Unanswered
from lightning_sparsefl_flower.misfits import misfits
from lightning_sparsefl_flower.replies import ORDERS, Refused, opened

Collect = Callable[[Sequence[Order], Sequence[Answer], Receive, Accumulator | None], list[Outcome]]
"""Checks the answers of a phase, and adds their updates to a sum."""


def collect_each(
    orders: Sequence[Order], answers: Sequence[Answer], receive: Receive, merge: Accumulator | None
) -> list[Outcome]:
    """Check and add one update after another.

    Args:
        orders: Orders of the phase.
        answers: One answer for each order.
        receive: Checks answers, charges them and adds them to a sum.
        merge: Sum; None = nothing is added.
    """
    return [outcome for pair in zip(orders, answers, strict=True) for outcome in receive([pair[0]], [pair[1]], merge)]


class FlowerCohort:
    """Sends each node the orders of its clients in one message, and adds what they answer in this process.

    Args:
        directory: Nodes and their clients.
        about: Sizes and capacities of the clients.
        codec: Codec of the run's model.
        device: Device of the server's state.
        ranks: Processes of the server, which are one.
        timeout: Seconds to wait for the answers of a phase.
        scores_global: Whether this process has a set to score the global model on.
        collect: How answers enter the sum; a sum of masked terms takes the place of single updates here.
    """

    def __init__(
        self,
        directory: Directory,
        about: AllAbout,
        codec: Codec,
        device: torch.device,
        ranks: Ranks,
        timeout: float,
        scores_global: bool,
        collect: Collect = collect_each,
    ) -> None:
        self.directory, self.codec, self.device, self.ranks = directory, codec, device, ranks
        self.timeout, self.scores_global, self.collect = timeout, scores_global, collect
        self.interrupts = Interrupts()
        self.watch: Callable[[str, int, int], None] | None = None
        self._about = about
        self._agreement = agreement(directory.facts)
        self._sent: dict[int, int] = {}
        """Length of the encoded message of each client in this phase."""

    def about(self) -> AllAbout:
        """Return sizes and capacities of the clients."""
        return self._about

    def stacks(self, plan: Plan) -> list[tuple[int, ...]]:
        """Return each client for itself: nodes train one client after another."""
        return [(client,) for client in plan.loads]

    def run(self, plan: Plan, order: MakeOrder, receive: Receive, merge: Accumulator | None) -> list[Outcome]:
        """Have the orders of a phase carried out by the nodes; see :class:`Cohort`.

        Raises:
            Interrupted: If a signal asks to stop.
        """
        self.interrupts.check()
        self._sent.clear()
        self._report(plan, 0)
        own: list[Outcome] = []
        orders = {client: order(client, False) for client in sorted(plan.loads)}
        answers = self._ask(orders, lambda: own.extend(self._server_work(plan)))
        again = {client: order(client, True) for client, answer in answers.items() if answer.forgot}
        orders, answers = orders | again, answers | self._ask(again)
        answers |= {c: _failed(orders[c], "its node lacks its record") for c, a in answers.items() if a.forgot}
        self.interrupts.check()
        updates = {client: answer.update for client, answer in answers.items() if answer.update is not None}
        answers |= {client: _failed(orders[client], reason) for client, reason in misfits(updates).items()}
        received = [answers[client] for client in orders]
        outcomes = self.collect(list(orders.values()), received, self._checked(receive), merge)
        if merge is not None:
            merge.all_reduce(self.ranks.sum, merge_headers([merge.headers()]))
            merge.collect(self.ranks.gather)
        self._report(plan, len(outcomes))
        return sorted([*own, *outcomes], key=lambda outcome: outcome.client)

    def _report(self, plan: Plan, done: int) -> None:
        if self.watch is not None:
            self.watch(plan.name, done, len(plan.loads))

    def _server_work(self, plan: Plan) -> list[Outcome]:
        return [plan.server_work.work()] if plan.server_work is not None and self.scores_global else []

    def _ask(self, orders: Mapping[int, Order], meanwhile: Callable[[], None] = lambda: None) -> dict[int, Answer]:
        """Return an answer for each order; that of a node which says nothing, or something wrong, is a failure."""
        self.directory.find(orders)
        by_node: dict[int, list[int]] = {}
        for client in orders:
            if client in self.directory.homes:
                by_node.setdefault(self.directory.homes[client], []).append(client)
        requests = {
            node: [ORDERS, self._agreement, *(self._encoded(orders[client]) for client in clients)]
            for node, clients in by_node.items()
        }
        kind = "train" if any(order.task in ("train", "survey") for order in orders.values()) else "evaluate"
        replies = self.directory.link.exchange(kind, requests, self.timeout, meanwhile)
        answers = {client: _failed(order, "no node has it") for client, order in orders.items()}
        for node, clients in by_node.items():
            answers |= self._opened([orders[client] for client in clients], replies[node])
        return answers

    def _encoded(self, order: Order) -> bytes:
        payload = encode_order(order, self.codec, order.message.masks if order.held is not None else None)
        self._sent[order.client] = len(order_header(payload)[1])
        return payload

    def _checked(self, receive: Receive) -> Receive:
        """Return a function that also compares what clients are charged with what was sent and received."""

        def checked(orders: Sequence[Order], answers: Sequence[Answer], merge: Accumulator | None) -> list[Outcome]:
            outcomes = receive(orders, answers, merge)
            self._check_charges(outcomes, {order.client: answer for order, answer in zip(orders, answers, strict=True)})
            return outcomes

        return checked

    def _check_charges(self, outcomes: Sequence[Outcome], answers: Mapping[int, Answer]) -> None:
        for outcome in outcomes:
            if outcome.charge is None or outcome.client not in self._sent:
                continue
            up, charged = answers[outcome.client].up, outcome.charge
            assert charged.downlink_bytes == self._sent[outcome.client], "the ledger charges the bytes that were sent"
            assert charged.uplink_bytes in (0, 0 if up is None else up.total), "and those that were received"

    def _opened(self, orders: Sequence[Order], replies: list[bytes] | Unanswered) -> dict[int, Answer]:
        if not isinstance(replies, Unanswered) and len(replies) != len(orders):
            replies = Unanswered(f"its node sent {len(replies)} replies to {len(orders)} orders")
        if isinstance(replies, Unanswered):
            return {order.client: _failed(order, replies) for order in orders}
        return {order.client: self._decoded(order, reply) for order, reply in zip(orders, replies, strict=True)}

    def _decoded(self, order: Order, reply: bytes) -> Answer:
        try:
            answer = decode_answer(opened(reply), self.codec, order.message)
        except Refused as refusal:
            return _failed(order, f"its node refused the order: {refusal}")
        except SparseFLError as error:
            return _failed(order, f"its node sent no answer that can be read: {error}")
        if answer.version not in (None, order.round + 1):
            return _failed(order, f"its answer has the version {answer.version}; expected {order.round + 1}")
        return replace(answer, update=None if answer.update is None else on_device(answer.update, self.device))

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Do nothing: the nodes have kept their records already."""

    def confirm(self, state: RunState, observed: Mapping[int, Any]) -> list[float]:
        """Return that nobody waited: one process computes the state."""
        return [0.0]


def _failed(order: Order, reason: str) -> Answer:
    return Answer(order.run, order.client, order.round, order.task, order.facts.num_examples, failure=reason)
