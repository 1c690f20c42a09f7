"""The server's half of a round: orders out, answers in, the next state."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_sparsefl.cost import Charge, Ledger
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.aggregation.clipping import require_norm
from lightning_sparsefl.federated.aggregation.server_optimizer import optimized, with_moments
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.hook_results import (
    check_amount,
    check_hashable,
    check_message,
    check_plain,
    check_result,
    check_state,
    check_update,
    check_weights,
    origin,
)
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order, Split, Task
from lightning_sparsefl.federated.exchange.update_checks import check_held, excess_reason, non_finite_reason
from lightning_sparsefl.federated.local.buffers import without_local_buffers
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.about import AllAbout
from lightning_sparsefl.federated.rounds.outcome import Outcome, longest
from lightning_sparsefl.federated.rounds.pending import pending_update, require_no_extra
from lightning_sparsefl.federated.rounds.round_draw import RoundDraw
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import within
from lightning_sparsefl.federated.sampling.samplers import Seen
from lightning_sparsefl.federated.storage.records import ServerRecord
from lightning_sparsefl.seeds import derive_key
from lightning_sparsefl.sparse.masks import changed, counts, digest, enforce
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Merged,
    Message,
    RunState,
    ServerState,
    Shared,
    Update,
    Weights,
)
from lightning_sparsefl.wire import Codec, Size


class Merges(Protocol):
    """Where received updates are added."""

    def check(self, update: Update, message: Message) -> None:
        """Check whether one update can be added, whatever the others are."""
        ...

    def add(self, update: Update, message: Message, num_examples: int) -> None:
        """Add one update."""
        ...


class Closed(NamedTuple):
    """A closed round."""

    state: RunState
    """State after the round."""
    observed: Mapping[int, Shared | None]
    """What `observe` returned for each participant."""


class ServerRecords(Protocol):
    """The part of a :class:`~lightning_sparsefl.federated.storage.record_store.RecordStore` that the server uses."""

    pinned: int | None

    def get(self, client: int, at: int | None = None) -> dict[str, Any] | None:
        """Return a client's record as plain values, or None."""
        ...

    def put(self, client: int, packed: dict[str, Any], version: int) -> None:
        """Add a version of a client's record."""
        ...


class _Issued(NamedTuple):
    """What the server keeps of an order until it is answered."""

    view: ClientView
    size: Size
    held: str | None
    """Digest of the message's masks."""


class Server:  # long because the facts of one order are needed at each of its steps: made, answered, closed
    """Server half of a round, which makes orders and merges answers, without the clients' data or memory.

    Args:
        algorithm: The federated method.
        federation: Options of the federation.
        layout: Layout of the model.
        codec: Codec of the run's model.
        workload: Facts that the cost of local training depends on.
        ledger: Ledger of the run.
        records: Records that the server keeps about clients.
        about: Facts of the clients.
        sampler: Cohorts by the sampler of the run.
        max_rounds: Number of rounds of the run.
        seed: Random seed of the run.
        device: Device of the server's state.
    """

    def __init__(
        self,
        *,
        algorithm: FederatedAlgorithm,
        federation: Federation,
        layout: Layout,
        codec: Codec,
        workload: Workload,
        ledger: Ledger,
        records: ServerRecords,
        about: AllAbout,
        sampler: CohortDraw,
        max_rounds: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.algorithm, self.federation, self.layout, self.codec = algorithm, federation, layout, codec
        self.workload, self.ledger, self.records, self.about = workload, ledger, records, about
        self.max_rounds, self.seed, self.device = max_rounds, seed, device
        self.draw = RoundDraw(sampler, about, workload, self._seconds_by_costs)
        self._issued: dict[int, _Issued] = {}
        self._messages = _Messages(codec)
        self._expected: tuple[ServerState, dict[Hashable, Costs]] | None = None

    @property
    def training_clients(self) -> Sequence[int]:
        """Numbers of the clients that cohorts are drawn from."""
        return self.draw.clients

    # ---- what the server knows of a client

    def record(self, client: int, at: int | None = None) -> ServerRecord:
        """Return what the server keeps about a client.

        Args:
            client: Number of the client.
            at: Number of finished rounds after which it was so; None = now.

        Raises:
            CheckpointMismatch: If a checkpoint brought a record of another model.
        """
        packed = self.records.get(client, at)
        if packed is None:
            return ServerRecord()
        record = ServerRecord.from_plain(packed, client, self.device)
        masks = {name: mask for name, mask in record.shared.get("masks", {}).items() if name in self.layout.shapes}
        self.layout.check_shapes(masks, f"The record of client {client}")
        return record

    def node_version(self, client: int, at: int) -> int | None:
        """Return the version of the node's record of a client after a number of rounds; None if it has none."""
        packed = self.records.get(client, at)
        return None if packed is None else packed["version"]

    def view(self, client: int, round: int, record: ServerRecord | None = None) -> ClientView:
        """Return what the algorithm may know of a client.

        Args:
            client: Number of the client.
            round: Number of the round.
            record: Record of the client; None = its newest record.
        """
        about, record = self.about.of(client, round), self.record(client) if record is None else record
        return ClientView(
            id=client,
            num_examples=about.num_examples,
            capacity=about.capacity,
            round=round,
            max_rounds=self.max_rounds,
            seed=self.seed,
            monitor=self.federation.monitor,
            shared=record.shared,
            local_epochs=about.local_epochs,
        )

    def with_neighbours(self, server: ServerState, view: ClientView) -> ClientView:
        """Return a client's view with those of its neighbours, as messages and costs need it.

        Args:
            server: State of the server.
            view: View of the client.

        Raises:
            InvalidOption: If the algorithm names a client that does not train.
        """
        if type(self.algorithm).neighbours_of is FederatedAlgorithm.neighbours_of:
            return view
        # those after `server.round` also for a last fit, which starts from what was scored then
        now = replace(view, round=server.round)
        named = self.algorithm.neighbours_of(now, self.training_clients)
        check_result(self.algorithm, "neighbours_of", named, Sequence)
        for client in named:
            if not (isinstance(client, int) and within(self.training_clients, client)):
                raise InvalidOption(
                    f"`{type(self.algorithm).__name__}.neighbours_of` returned {client!r} for client {view.id}; "
                    "expected numbers of clients that train."
                )
        records = {client: self.record(client, server.round) for client in sorted(named)}
        return replace(view, neighbours={n: self.view(n, view.round, record) for n, record in records.items()})

    def alike(self, server: ServerState, clients: Sequence[int]) -> dict[int, Hashable] | None:
        """Return what the clients of a stack must have in common; None for a method whose clients all train alike.

        Args:
            server: State of the server.
            clients: Numbers of the clients.
        """
        if type(self.algorithm).alike is FederatedAlgorithm.alike:
            return None
        found = {client: self.algorithm.alike(server, self.view(client, server.round)) for client in clients}
        for value in found.values():
            check_hashable(self.algorithm, "alike", value)
        return found

    # ---- orders

    def order(
        self,
        state: RunState,
        client: int,
        task: Task = "train",
        splits: tuple[Split, ...] = (),
        *,
        round: int | None = None,
        message: Message | None = None,
        forgotten: bool = False,
    ) -> Order:
        """Make the order for one client.

        Args:
            state: State of the run.
            client: Number of the client.
            task: Task of the client.
            splits: Splits to score.
            round: Number of the round that the client works in; None = the one that the state stands before.
            message: Message to send, which `init` made; None = that of `download`.
            forgotten: Whether the node has lost its record, so that the client starts anew.
        """
        round = state.server.round if round is None else round
        record = self.record(client, state.server.round)
        record = ServerRecord() if forgotten else record
        view = self.with_neighbours(state.server, self.view(client, round, record))
        if message is None:
            message = self._message(state.server, view, task)
        else:
            check_message(self.algorithm, "init", message, self.layout)
        message = without_local_buffers(message, self.federation.buffers, self.layout)
        held = digest(message.masks) if message.masks else None
        known = held is not None and held == record.held
        known_masks = message.masks if known else None
        if view.neighbours:  # whose models no other message has
            message, size = self._messages.measured(message, known_masks)
        else:
            message, size = self._messages.prepare(message, known_masks)
        self._issued[client] = _Issued(view, size, held)
        return Order(
            run=state.run,
            client=client,
            round=round,
            task=task,
            facts=_facts(view),
            key=derive_key(self.seed, "client", client),
            message=message,
            splits=splits,
            held=held if known else None,
            version=record.version,
            keep=self._keep(state),
        )

    def _message(self, server: ServerState, view: ClientView, task: Task) -> Message:
        if task in ("score", "finetune"):
            purpose: Literal["score", "finetune"] = "score" if task == "score" else "finetune"
            hook, message = "download_for", self.algorithm.download_for(server, view, purpose)
        else:
            hook, message = "download", self.algorithm.download(server, view)
        check_message(self.algorithm, hook, message, self.layout)
        return message

    def _keep(self, state: RunState) -> tuple[int, ...]:
        """Return the rounds whose versions of the nodes' records may be asked for again."""
        pinned = self.records.pinned
        return tuple(sorted({state.server.round} if pinned is None else {state.server.round, pinned}))

    # ---- answers

    def receive(
        self,
        orders: Sequence[Order],
        answers: Sequence[Answer],
        merge: Merges | None,
        late: Collection[int] = (),
    ) -> list[Outcome]:
        """Check, charge and add answers; what only this check finds is that client's failure.

        Args:
            orders: Orders that were answered.
            answers: One answer for each order.
            merge: Sum that updates are added to; None for scores.
            late: Clients whose updates are kept for later rounds instead.

        Returns:
            One outcome for each order.

        Raises:
            InvalidUpdate: If the answer came from this process, and the algorithm's update cannot be merged, or if it
                does not fit the updates of other clients.
        """
        pairs = zip(orders, answers, strict=True)
        return [self._receive(order, answer, merge, order.client in late) for order, answer in pairs]

    def _receive(self, order: Order, answer: Answer, merge: Merges | None, late: bool) -> Outcome:
        issued = self._issued.pop(order.client)
        failure = answer.failure or _mismatch(order, answer) or _unscored(order, answer)
        failure = failure or self._fault(order, answer, merge)
        num_examples, elapsed = issued.view.num_examples, answer.elapsed
        if failure is None and order.task in ("score", "finetune"):
            size, scores = issued.size.total, answer.scores
            return Outcome(order.client, num_examples=num_examples, scores=scores, scoring_bytes=size, elapsed=elapsed)
        blank = Outcome(order.client, num_examples=num_examples, elapsed=elapsed)
        if failure is not None:
            charge = self.charge(issued.view, order.message, issued.size, None) if order.task == "train" else None
            return replace(blank, status="failed", charge=charge, failure=failure)
        assert answer.update is not None
        assert answer.up is not None
        if order.task == "train" and self.draw.merges_late:
            require_no_extra(order, answer.update)
        if order.task == "survey":
            charge = _transfer(issued.view, issued.size, answer.up)
        else:
            charge = self.charge(issued.view, order.message, issued.size, answer.up)
        outcome = self._trained(blank, order, answer, answer.update, charge, issued)
        if late:
            assert outcome.simulated_seconds is not None
            pending = pending_update(order, answer.update, outcome.simulated_seconds)
            return replace(outcome, status="late", pending=pending)
        if merge is not None:  # last, so that a client that fails leaves no trace in the sum
            try:
                merge.add(answer.update, order.message, num_examples)
            except (InvalidOption, InvalidUpdate) as error:
                raise type(error)(f"{origin(self.algorithm, order)} cannot be added: {error}") from None
        return outcome

    def _trained(
        self, blank: Outcome, order: Order, answer: Answer, update: Update, charge: Charge, issued: _Issued
    ) -> Outcome:
        message, view = order.message, issued.view
        masks = (update.shared or {}).get("masks")
        held = issued.held if masks is None else digest(masks)
        record = ServerRecord(view.shared if update.shared is None else update.shared, held, answer.version)
        return replace(
            blank,
            metrics={name: float(value) for name, value in update.metrics.items()},
            charge=charge,
            record=record.to_plain(),
            version=answer.version,
            densities=_densities(message.masks or update.votes or {}),
            changed=0.0 if masks is None else changed(message.masks, masks),
            scores=answer.scores,
            simulated_seconds=None
            if self.workload.layers is None
            else self._seconds(view, charge.flops_train, charge.uplink_bytes),
        )

    def _fault(self, order: Order, answer: Answer, merge: Merges | None) -> str | None:
        """Return what is wrong with an update that another process made, as a clause."""
        update = answer.update
        if answer.checked or order.task in ("score", "finetune"):
            return None
        if update is None:
            return "it returned no update"
        try:
            check_update(self.algorithm, update, order.message, order, self.layout)
            if self.federation.clip_update is not None and order.task == "train":
                require_norm(update, order.message, self.federation.clip_update, self.layout)
            if merge is not None:
                merge.check(update, order.message)
        except (IncompatibleMasks, InvalidOption, InvalidUpdate) as error:
            return str(error)
        return non_finite_reason(update) or excess_reason(update, order.facts.num_examples, self.layout)

    def charge(self, view: ClientView, message: Message, down: Size, up: Size | None, again: bool = False) -> Charge:
        """Return one client's charge for training; a client that failed pays for its download alone.

        Args:
            view: Facts of the client.
            message: Message that the client received.
            down: Size of the encoded message.
            up: Size of the encoded update; None if the client sent no update.
            again: Whether a rehearsed client took part before.
        """
        costs = self.costs(replace(self.workload.facts(view, message), again=again))
        received = Charge(
            round=view.round,
            client=view.id,
            downlink_bytes=down.total,
            mask_bytes=down.masks,
            paper_bytes_down=costs.bytes_down_paper,
        )
        if up is None:
            return received
        return replace(
            received,
            uplink_bytes=up.total,
            mask_bytes=down.masks + up.masks,
            paper_bytes_up=costs.bytes_up_paper,
            flops_train=costs.flops_analytic,
            flops_paper=costs.flops_paper,
        )

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of one client-round by the algorithm.

        Args:
            facts: Facts that the costs depend on.

        Raises:
            InvalidOption: If a cost is not a finite number >= 0.
        """
        costs = self.algorithm.costs(facts)
        check_result(self.algorithm, "costs", costs, Costs)
        for name, cost in vars(costs).items():
            check_amount(self.algorithm, "costs", cost, f" as `{name}`")
        return costs

    def late(self, state: RunState, client: int) -> Outcome:
        """Return the outcome of a late client, which is charged for its download and its FLOPs, and not trained.

        Args:
            state: State before the round.
            client: Number of the client.
        """
        order = self.order(state, client)
        issued = self._issued.pop(client)
        charge = self.charge(issued.view, order.message, issued.size, Size(total=0, masks=0))
        return Outcome(
            client=client,
            status="late",
            num_examples=issued.view.num_examples,
            charge=replace(charge, paper_bytes_up=0.0),
            simulated_seconds=self.draw.expected_seconds(state, client),
        )

    # ---- times

    def _seconds_by_costs(self, state: RunState, client: int) -> float | None:
        """Return the time of a client-round by its costs, which are known without training; None if it is not."""
        if self.workload.layers is None:
            return None
        view = self.view(client, state.server.round, self.record(client, state.server.round))
        view = self.with_neighbours(state.server, view)
        costs = self._expected_costs(state.server, view)
        copies = max(len(view.neighbours), 1)  # for as many clients, of which the measured upload is one
        return self._seconds(view, costs.flops_analytic, round(costs.bytes_up_paper / copies))

    def _expected_costs(self, server: ServerState, view: ClientView) -> Costs:
        """Return the costs of a client-round; once for clients that these hooks cannot tell apart."""
        method, base = type(self.algorithm), FederatedAlgorithm
        if any(getattr(method, hook) is not getattr(base, hook) for hook in ("download", "download_for", "costs")):
            return self.costs(self.workload.facts(view, self._message(server, view, "train")))
        if self._expected is None or self._expected[0] is not server:
            self._expected = server, {}
        known, key = self._expected[1], (view.num_examples, view.local_epochs, self.workload.batching(view.id))
        if key not in known:
            known[key] = self.costs(self.workload.facts(view, self._message(server, view, "train")))
        return known[key]

    def _seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """Return the simulated time of a client-round, by the algorithm or by `federation.devices`."""
        devices, where = self.federation.devices, f" for client {view.id}"
        seconds = self.algorithm.simulated_seconds(view, flops, bytes_up)
        if seconds is not None:
            check_amount(self.algorithm, "simulated_seconds", seconds, where)
            return seconds
        if devices is None:
            return None
        capacity = devices.capacity(view)
        check_amount(devices, "capacity", capacity, where, share=True)
        seconds = devices.seconds(capacity, flops, bytes_up)
        check_amount(devices, "seconds", seconds, where)
        return seconds

    # ---- the end of a round

    def close(self, state: RunState, merged: Merged, outcomes: Sequence[Outcome], start: float) -> Closed:
        """Aggregate, observe, and store what the participants left.

        Args:
            state: State before the round.
            merged: The round's updates after the reduction.
            outcomes: Outcomes of all clients that were drawn.
            start: Simulated time at which the round started.
        """
        round, end = state.server.round, start + longest(outcomes)
        server = replace(self._aggregate(state.server, merged), round=round + 1)
        trained = [outcome for outcome in outcomes if outcome.record is not None]
        observed = {outcome.client: self._file(server, outcome, round) for outcome in trained}
        sampler = self.draw.learned(state, self._seen(outcomes), start)
        self._expected = None  # so that the old state does not stay in memory
        waiting = [update for update in state.pending if not update.has_arrived(end)]
        waiting += [replace(o.pending, arrival=start + o.pending.arrival) for o in outcomes if o.pending is not None]
        return Closed(replace(state, server=server, sampler=sampler, pending=tuple(waiting), seconds=end), observed)

    def _seen(self, outcomes: Sequence[Outcome]) -> dict[int, Seen]:
        """Return what the sampler learns about the clients of a round."""
        return {
            outcome.client: Seen(
                samples=self.workload.samples(outcome.client, outcome.num_examples),
                counted=outcome.status == "counted",
                metrics=outcome.metrics,
                seconds=outcome.simulated_seconds,
            )
            for outcome in outcomes
        }

    def _aggregate(self, before: ServerState, merged: Merged) -> ServerState:
        optimizer = self.federation.server_optimizer
        moments: Mapping[str, Weights] = {}
        if optimizer is not None:
            weights = self.algorithm.weights_to_step(before)
            check_weights(self.algorithm, "weights_to_step", weights, self.layout)
            stepped = replace(before, weights=weights)
            merged, moments = optimized(optimizer, stepped, merged, self.layout.buffers)
        state = self.algorithm.aggregate(before, merged)
        state = check_state(self.algorithm, "aggregate", state, self.layout)
        return state if optimizer is None else with_moments(optimizer, state, moments)

    def _file(self, server: ServerState, outcome: Outcome, round: int) -> Shared | None:
        """Store a participant's new record and charge; return what the algorithm observed, given the new state."""
        assert outcome.record is not None
        assert outcome.charge is not None
        packed, observed = dict(outcome.record), None
        if type(self.algorithm).observe is not FederatedAlgorithm.observe:  # unpacking a record takes time
            record = ServerRecord.from_plain(packed, outcome.client, self.device)
            observed = self.algorithm.observe(server, self.view(outcome.client, round, record), outcome.report)
            check_result(self.algorithm, "observe", observed, Mapping, optional=True)
            if observed is not None:
                check_held(
                    f"The record from `{type(self.algorithm).__name__}.observe` holds `masks`",
                    observed.get("masks", {}),
                    self.layout,
                )
                packed["shared"] = check_plain(self.algorithm, "observe", observed)
        if packed["shared"] or packed != self.records.get(outcome.client, round):  # tensors are not compared
            self.records.put(outcome.client, packed, round + 1)
        self.ledger.add(outcome.charge)
        return observed


class _Messages:
    """The newest messages as they arrive, and their sizes, so that equal messages are masked and measured once.

    Messages are equal here if their trees hold the same tensor objects by the same names. Tensors are not changed in
    place during a round.
    """

    _REMEMBERED = 8

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: dict[Hashable, tuple[list[Tensor], Weights, Size]] = {}

    def prepare(self, message: Message, known: Masks | None) -> tuple[Message, Size]:
        """Return a message with zeros under its masks, as a client decodes it, and its size.

        Args:
            message: The message.
            known: Masks that the client holds, or None.
        """
        trees = (message.weights, message.masks, message.trainable, *message.extra.values())
        tensors = [tensor for tree in trees for tensor in tree.values()]
        key = (known is None, tuple(message.extra), *(tuple((name, id(tree[name])) for name in tree) for tree in trees))
        if key not in self._known:
            while len(self._known) >= self._REMEMBERED:
                del self._known[next(iter(self._known))]
            sent, size = self.measured(message, known)
            self._known[key] = tensors, sent.weights, size  # with the tensors, so that no other gets their identity
        _, weights, size = self._known[key]
        return replace(message, weights=weights), size

    def measured(self, message: Message, known: Masks | None) -> tuple[Message, Size]:
        """Return the same of a message that is not remembered; see :meth:`prepare`."""
        sent = replace(message, weights=enforce(message.weights, message.masks))
        return sent, self._codec.message_size(sent, known)


def _facts(view: ClientView) -> ClientFacts:
    """Return the part of a view that the client may know."""
    return ClientFacts(view.num_examples, view.capacity, view.max_rounds, view.monitor, view.local_epochs)


def _mismatch(order: Order, answer: Answer) -> str | None:
    """Return in what an answer is of another order, as a clause."""
    for name in ("run", "client", "round", "task"):
        got, expected = getattr(answer, name), getattr(order, name)
        if got != expected:
            return f"its answer has the {name} {got!r}, where the order has {expected!r}"
    return None


def _unscored(order: Order, answer: Answer) -> str | None:
    """Return which scores an answer lacks, as a clause; a method may leave clients unscored after a last fit."""
    missing = [split for split in order.splits if split not in answer.scores]
    if not missing or order.task == "finetune":
        return None
    return f"its answer has no scores of {missing}, where the order asks for {list(order.splits)}"


def _transfer(view: ClientView, down: Size, up: Size) -> Charge:
    """Return the charge for a survey: its bytes, counted to the first round."""
    masks = down.masks + up.masks
    return Charge(round=0, client=view.id, downlink_bytes=down.total, uplink_bytes=up.total, mask_bytes=masks)


def _densities(masks: Masks) -> dict[str, float]:
    return {name: kept / max(masks[name].numel(), 1) for name, kept in counts(masks).items()}
