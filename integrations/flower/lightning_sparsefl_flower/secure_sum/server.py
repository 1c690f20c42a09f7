"""The server's side of a round whose updates are summed under masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeader, merge_headers
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.orders import Answer, Order
from lightning_sparsefl.federated.rounds.cohort import Receive
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.types import Update
from torch import Tensor

from lightning_sparsefl_flower.secure_sum.client_sum import context_of, form_of
from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused
from lightning_sparsefl_flower.secure_sum.headers import plain_headers, read_headers
from lightning_sparsefl_flower.secure_sum.messages import join
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.session import Session
from lightning_sparsefl_flower.secure_sum.support import common_support, pack_bits
from lightning_sparsefl_flower.secure_sum.vectors import Mode


class Gone(str):
    """Why a client has not answered a step, as a clause."""


Ask = Callable[[str, Mapping[int, bytes]], Mapping[int, "bytes | Gone"]]
"""Lets clients take a step, by name, with a payload for each; returns what each sends back, or why it is gone."""


class SecureCollect:
    """Takes the place of the sum of single updates in a cohort: several messages in a round, and one sum.

    Args:
        layout: Layout of the model.
        policy: What the nodes demand of a sum.
        ask: Lets clients take a step.
    """

    def __init__(self, layout: Layout, policy: Policy, ask: Ask) -> None:
        self.layout, self.policy, self.ask = layout, policy, ask

    def __call__(
        self, orders: Sequence[Order], answers: Sequence[Answer], receive: Receive, merge: Accumulator | None
    ) -> list[Outcome]:
        """Sum the updates that the clients of answers have kept, and check and charge the answers.

        Args:
            orders: Orders of a phase.
            answers: One answer for each order, without the update that is to be summed.
            receive: Checks answers and charges them.
            merge: Sum that is added to; None = nothing is summed.

        Returns:
            One outcome for each order; a client that left before its masked update arrived is failed.

        Raises:
            SecureSumRefused: If what clients sent cannot be summed.
            TooFewClients: If too few clients are left.
        """
        pairs = zip(orders, answers, strict=True)
        clients = {order.client: order for order, answer in pairs if answer.failure is None}
        if merge is None or not clients:
            return receive(orders, answers, None)
        one = _RoundSum(self.layout, self.policy, self.ask, clients, merge)
        one.run()
        answers = [one.after(answer) for answer in answers]
        return [one.charged(outcome) for outcome in receive(orders, answers, None)]


class _RoundSum:
    """The one or two sums of a round."""

    def __init__(
        self, layout: Layout, policy: Policy, ask: Ask, orders: Mapping[int, Order], merge: Accumulator
    ) -> None:
        self.layout, self.policy, self._ask, self.orders, self.merge = layout, policy, ask, orders, merge
        self.left = sorted(orders)
        self.gone: dict[int, str] = {}
        self.up, self.down = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)

    def run(self) -> None:
        """Sum; where votes differ, count them first, so that no coordinate with too few of them is summed."""
        support = self._sum(1, None)
        if support is not None:
            self._sum(2, support)

    def after(self, answer: Answer) -> Answer:
        """Return an answer, which is a failure if the client's update is not in the sum.

        Args:
            answer: Answer without the update.
        """
        if answer.client not in self.gone:
            return answer
        return replace(answer, update=None, failure=f"it left the secure sum: {self.gone[answer.client]}")

    def charged(self, outcome: Outcome) -> Outcome:
        """Return an outcome that is charged for the bytes of the sums too.

        Args:
            outcome: Outcome of a client.
        """
        if outcome.charge is None or outcome.client not in self.up:
            return outcome
        charge, client = outcome.charge, outcome.client
        up, down = charge.uplink_bytes + self.up[client], charge.downlink_bytes + self.down[client]
        return replace(outcome, charge=replace(charge, uplink_bytes=up, downlink_bytes=down))

    def ask(self, step: str, payloads: Mapping[int, bytes]) -> dict[int, bytes]:
        """Let clients take a step; return what those that are left send back."""
        for client, payload in payloads.items():
            self.down[client] += len(payload)
        replies = self._ask(step, payloads)
        missing = {client: Gone("its node sent nothing") for client in payloads if client not in replies}
        replies = {**replies, **missing}
        self.gone.update({client: str(reply) for client, reply in replies.items() if isinstance(reply, Gone)})
        found = {client: reply for client, reply in sorted(replies.items()) if not isinstance(reply, Gone)}
        for client, reply in found.items():
            self.up[client] += len(reply)
        return found

    def _sum(self, number: int, support: Tensor | None) -> Tensor | None:
        """Carry one sum out; return the coordinates of the next one, or None if this was the last."""
        grid, order = self.merge.grid, next(iter(self.orders.values()))
        session = Session(context_of(order.run, order.round, number), self.policy)
        bits = b"" if support is None else pack_bits(support)
        begin = join({"steps": list(grid.steps), "total_weight": grid.total_weight}, bits)
        roster = session.roster(self.ask("advertise", dict.fromkeys(self.left, begin)))
        facts = _Facts(self.layout, {client: advert.facts for client, advert in session.adverts.items()})
        mode = self._mode(facts, support)
        headers = facts.headers(self.policy.min_coverage)
        kept = self._common_support(facts) if mode == "common" else support
        form = form_of(self.layout, mode, headers, kept, len(session.adverts), grid)
        plan = join({"mode": mode, "headers": plain_headers(headers)}, roster)
        boxes = self.ask("share", dict.fromkeys(session.adverts, plan))
        masked = self.ask("mask", session.inboxes(boxes))
        survivors = session.survivors((client, form.unpack(payload)) for client, payload in masked.items())
        self.left = sorted(masked)
        signatures = session.signatures(self.ask("confirm", dict.fromkeys(masked, survivors)))
        confirmed = [client for client in masked if client not in self.gone]
        total = form.integers(session.unmask(self.ask("reveal", dict.fromkeys(confirmed, signatures))))
        self._check(total, len(masked))
        if mode == "coverage":
            return self._covered(total)
        for client in masked:  # one that left after its masked update had arrived is in the sum
            self.gone.pop(client, None)
        self.merge.add_integers(total, headers)
        return None

    def _mode(self, facts: _Facts, support: Tensor | None) -> Mode:
        if support is None and facts.votes is not None:
            return "common"
        return "coverage" if support is None and self.policy.min_coverage > 1 else "ragged"

    def _common_support(self, facts: _Facts) -> Tensor:
        message = self.orders[facts.clients[0]].message
        return common_support(self.layout, voted(Update(weights={}), message), facts.unsent)

    def _covered(self, total: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates on which enough clients voted, of those whose votes were counted."""
        _, _, _, dense, _, _, _, *not_sent = total["facts"].tolist()
        counts = total["voters"] + dense
        missing = torch.tensor(not_sent).repeat_interleave(torch.tensor(self.layout.sizes))
        covered: Tensor = counts - missing >= self.policy.min_coverage
        return covered

    def _check(self, total: Mapping[str, Tensor], clients: int) -> None:
        """Raise unless the numbers of a sum are possible, which they are by chance only if a client sent others."""
        _, _, weight, dense, whole, differences, updates, *not_sent = total["facts"].tolist()
        most = self.merge.grid.total_weight
        counts = [dense, whole, differences, *not_sent, *total["voters"].aminmax()] if len(total["voters"]) else [dense]
        weights = [total[name] for name in ("counts", "coordinate_counts") if name in total]
        fits = updates == clients and clients <= weight <= most and all(0 <= int(count) <= clients for count in counts)
        if not fits or any(bool(((each < 0) | (each > most)).any()) for each in weights):
            raise SecureSumRefused(
                f"The secure sum of {clients} clients states {updates} updates with the weight {weight}; expected "
                f"as many, a weight of at most {most}, and votes within them: a client has sent something else."
            )


class _Facts:
    """What the adverts of a sum say of the form of the clients' terms."""

    def __init__(self, layout: Layout, facts: Mapping[int, bytes]) -> None:
        self.clients = sorted(facts)
        self._each = [_read(layout, client, facts[client]) for client in self.clients]
        kinds = {each["kind"] for each in self._each} - {None}
        if len(kinds) > 1:
            raise SecureSumRefused("The updates of a secure sum hold weights and differences; expected one kind.")
        try:
            self._headers = merge_headers(each["headers"] for each in self._each)
        except InvalidUpdate as error:
            raise SecureSumRefused(f"The updates of a secure sum do not fit each other: {error}") from None

    @property
    def votes(self) -> str | None:
        """Digest of the votes, if all clients have those of their message, and send the same tensors."""
        kinds = {(each["votes"], tuple(each["unsent"])) for each in self._each}
        return self._each[0]["votes"] if len(kinds) == 1 else None

    @property
    def unsent(self) -> list[str]:
        """Names of the tensors that no client sends, where all send the same."""
        names: list[str] = self._each[0]["unsent"]
        return names

    def headers(self, least: int) -> dict[str, dict[str, SumHeader]]:
        """Return the merged headers of the extra trees that at least so many clients send.

        Args:
            least: Least number of clients.
        """
        senders = [(key, name) for each in self._each for key, tree in each["headers"].items() for name in tree]
        kept = {
            k: {n: h for n, h in tree.items() if senders.count((k, n)) >= least} for k, tree in self._headers.items()
        }
        return {key: tree for key, tree in kept.items() if tree}


def _read(layout: Layout, client: int, payload: bytes) -> dict[str, Any]:
    """Return the facts of one client, checked."""
    try:
        facts = json.loads(payload)
        unsent, votes, kind = facts["unsent"], facts["votes"], facts["kind"]
        fits = votes is None or type(votes) is str
        fits &= kind in (None, "weights", "difference") and set(unsent) <= set(layout.names)
        found = {"headers": read_headers(facts["headers"], 4 * layout.size + 2**16)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SecureSumRefused(f"Client {client} sent facts of a secure sum that cannot be read ({error}).") from None
    if not fits:
        raise SecureSumRefused(f"Client {client} sent facts of a secure sum that are out of range.")
    return {**found, "unsent": unsent, "votes": votes, "kind": kind}
