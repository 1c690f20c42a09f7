"""Simulation of client-rounds by a server, and by a node that does not train."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning.fabric.plugins import Precision
from lightning.pytorch import LightningModule

from lightning_sparsefl.cost import Charge, Ledger
from lightning_sparsefl.errors import ClientFailed, InvalidOption, SparseFLError
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, CoverageMean
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.commands.simulated_worker import SimulatedWorker
from lightning_sparsefl.federated.exchange.flat import FlatModule, Layout
from lightning_sparsefl.federated.exchange.hook_results import check_hashable, check_result, check_state
from lightning_sparsefl.federated.exchange.orders import Order
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews
from lightning_sparsefl.federated.local.example_input import layers_of, units_of
from lightning_sparsefl.federated.local.node import Node, NodeOptions
from lightning_sparsefl.federated.rounds.about import About, AboutClients, AllAbout
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.rounds.workload import Batching, Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import split_unseen
from lightning_sparsefl.federated.storage.records import ServerRecord
from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.sparse.parts import norms_of
from lightning_sparsefl.sparse.uses import uses_of
from lightning_sparsefl.types import ClientView, Costs, Merged, Message, RunState, ServerState, Weights
from lightning_sparsefl.wire import Codec


class Part(NamedTuple):
    """A group of client-rounds whose messages have the same size."""

    middle: int
    """Middle round of the part of the run."""
    again: bool
    """Whether the client participated before."""
    capacity: float
    kind: Hashable
    """What clients of equal costs have in common besides (`FederatedAlgorithm.equal_costs`)."""


class Work(NamedTuple):
    """What the costs of a client-round depend on, and the sizes of its messages do not."""

    num_examples: int
    local_epochs: int | None
    batching: Batching


@dataclass(frozen=True)
class _Representing:
    """Facts of clients, some of which stand for all clients of their capacity in every round."""

    drawn: AllAbout
    fixed: Mapping[int, float]
    """The capacities that clients stand for."""

    def of(self, client: int, round: int) -> About:
        """Return the facts of a client in a round, with the capacity that it stands for."""
        about = self.drawn.of(client, round)
        return replace(about, capacity=self.fixed.get(client, about.capacity))

    def available_from(self, client: int, at: float) -> float:
        """Return the time itself, since clients are always available here."""
        return at


class _Simulated(NamedTuple):
    """One simulated client-round."""

    order: Order
    charge: Charge


class Simulation:
    """A server, and a node that does not train, which simulate client-rounds in the order of the run.

    Args:
        options: Options of the run.
        module: Module of the user; it is not changed.
        data: Data module of the clients.
        precision: Precision of the run.
        phases: Progress of the simulation.
    """

    def __init__(
        self, options: RunOptions, module: LightningModule, data: Any, precision: Precision, phases: PhaseProgress
    ) -> None:
        self._phases = phases
        federation, seed, sizes = options.federation, options.seed, _nominal_sizes(data)
        module = copy.deepcopy(module)
        options.algorithm.adapt(module)
        precision.convert_module(module)
        flat = FlatModule(module)
        weights, layout, device = flat.read(), flat.layout, flat.vector.device
        known = (lambda: units_of(module, data), norms_of(module), getattr(module, "exits", {}), uses_of(module))
        worker = SimulatedWorker(layout, weights, seed, *known)
        self._about = about = AboutClients(federation, sizes.__getitem__, len(sizes), seed)
        self._records, self._versions = _Records(), _Records()
        training_clients, _ = split_unseen(seed, len(sizes), federation.unseen_clients)
        workload = self._workload(options, module, data, layout, worker)
        self.server = Server(
            algorithm=options.algorithm,
            federation=federation,
            layout=layout,
            codec=Codec(weights, options.algorithm.may_vote),
            workload=workload,
            ledger=Ledger(counts_flops=workload.layers is not None),
            records=self._records,
            about=about,
            sampler=CohortDraw(training_clients, federation.clients_per_round, seed),
            max_rounds=options.max_rounds,
            seed=seed,
            device=device,
        )
        rules = NodeOptions(buffers=federation.buffers, clip_update=federation.clip_update)
        codec = self.server.codec
        self._node = Node(options.algorithm, worker, self._versions, codec, layout, weights, device, rules)
        self._surveys: list[Charge] = []
        state = options.algorithm.init(flat.read(), self._fleet(weights, worker))
        state = check_state(options.algorithm, "init", state, layout)
        self.first = RunState(state)
        self.representatives = self._representatives(training_clients)

    def kind(self, client: int) -> Hashable:
        """Return what clients of equal capacity and costs have in common; any are taken where capacities are redrawn.

        Args:
            client: Number of the client.
        """
        server = self.server
        own = type(server.algorithm).equal_costs is not FederatedAlgorithm.equal_costs
        if server.federation.redraw_capacities or not own:
            return None
        kind = server.algorithm.equal_costs(self.first.server, server.view(client, 0, ServerRecord()))
        check_hashable(server.algorithm, "equal_costs", kind)
        return kind

    def _representatives(self, clients: Sequence[int]) -> dict[tuple[float, Hashable], int]:
        """Return a client for each capacity and kind: the first one that has them."""
        federation = self.server.federation
        if federation.redraw_capacities:
            each = zip(sorted(set(federation.capacities or [])), clients, strict=False)
            return {(capacity, None): client for capacity, client in each}
        return {(self._about.of(client, 0).capacity, self.kind(client)): client for client in reversed(clients)}

    def fix_capacities(self) -> None:
        """Give each client that is simulated the capacity that it stands for, in every round."""
        fixed = {client: capacity for (capacity, _), client in self.representatives.items()}
        self.server.about = _Representing(self.server.about, fixed)

    def _workload(
        self, options: RunOptions, module: LightningModule, data: Any, layout: Layout, worker: SimulatedWorker
    ) -> Workload:
        return Workload(
            layers_of(module, data),
            options.local.max_epochs,
            data.batch_size,
            options.local.limit_train_batches,
            getattr(data, "drop_last", False),
            layout.buffers,
            worker,
            getattr(data, "own_batches", {}),
        )

    def _fleet(self, weights: Weights, worker: SimulatedWorker) -> Fleet:
        server = self.server
        return Fleet(
            LazyClientViews(server.training_clients, lambda i: server.view(i, 0, ServerRecord())),
            server.layout.buffers,
            server.device,
            worker,
            survey=lambda message: self._survey(RunState(ServerState(0, weights)), message),
            clients_per_round=server.federation.clients_per_round,
            execution=server.federation.execution,
            batches=server.workload.batches,
            samples=server.workload.round_samples,
            layers=server.workload.layers or (),
        )

    def _survey(self, state: RunState, message: Message) -> Merged:
        """Run a survey of all clients, without data."""
        clients = self.server.training_clients
        total = max(sum(self._about.of(client, 0).num_examples for client in clients), len(clients))
        merge = CoverageMean().start(self.server.layout, state.server.weights, total)
        reports = {}
        for done, client in enumerate(clients, start=1):
            order = self.server.order(state, client, "survey", message=message)
            outcome = self._answer(order, merge)
            reports[client] = outcome.metrics
            self._surveys += [outcome.charge] if outcome.charge else []
            self._phases.show("survey", done, len(clients))
        return merge.result(reports)

    def _answer(self, order: Order, merge: Accumulator | None = None) -> Outcome:
        (answer,) = self._node.answer([order])
        if answer.error is not None:
            if isinstance(answer.error, SparseFLError):
                raise answer.error
            failure, client, round = answer.failure or "", order.client, order.round
            raise ClientFailed(failure, client=client, round=round, rank=0, during="simulation") from answer.error
        (outcome,) = self.server.receive([order], [answer], merge)
        return outcome

    def _simulate(self, part: Part) -> _Simulated:
        """Simulate one client-round of a part; parts must come in the order of the run."""
        client = self.representatives[part.capacity, part.kind]
        if not part.again:
            self._records.forget(client)
            self._versions.forget(client)
        state = self.server.algorithm.profile_state(self.first.server, part.middle)
        check_result(self.server.algorithm, "profile_state", state, ServerState)
        order = self.server.order(replace(self.first, server=state), client, round=part.middle)
        outcome = self._answer(order)
        assert outcome.charge is not None
        assert outcome.record is not None
        self._records.put(client, dict(outcome.record), part.middle + 1)
        return _Simulated(order, outcome.charge)

    def total(self, parts: Mapping[Part, Mapping[Work, int]]) -> dict[str, float]:
        """Sum the costs of all client-rounds, by ``column.key``.

        Counting the weights kept by masks is slow, so the costs of clients with other numbers of samples or epochs are
        computed again only if those of the first client of their capacity have changed.

        Args:
            parts: Number of client-rounds by part and by the client's work.
        """
        known: dict[tuple[Costs, float, Hashable, Work], Costs] = {}
        total: dict[str, float] = defaultdict(int)
        for charge in self._surveys:
            for name, value in _flat(Costs(0, 0, 0, 0), charge).items():
                total[name] += value
        for done, (part, client_rounds) in enumerate(parts.items()):
            self._phases.show("simulate", done, len(parts), "client-rounds")
            view = self._view_before(part)
            order, charge = self._simulate(part)
            first = self._costs(replace(view, local_epochs=None), order, part)
            for work, times in client_rounds.items():
                key = first, part.capacity, part.kind, work
                if key not in known:
                    own = replace(view, num_examples=work.num_examples, local_epochs=work.local_epochs)
                    known[key] = self._costs(own, order, part, work.batching)
                for name, value in _flat(known[key], charge).items():
                    total[name] += times * value
        self._phases.close()
        return total

    def _view_before(self, part: Part) -> ClientView:
        """Return the server's view of a part's client before the simulation."""
        client = self.representatives[part.capacity, part.kind]
        record = self.server.record(client) if part.again else ServerRecord()
        return self.server.with_neighbours(self.first.server, self.server.view(client, part.middle, record))

    def _costs(self, view: ClientView, order: Order, part: Part, batching: Batching | None = None) -> Costs:
        facts = self.server.workload.facts(view, order.message, batching)
        return self.server.costs(replace(facts, again=part.again))


class _Records:
    """The last record of each simulated client, returned for any requested version."""

    pinned: int | None = None

    def __init__(self) -> None:
        self._packed: dict[int, dict[str, Any]] = {}

    def get(self, client: int, at: int | None = None) -> dict[str, Any] | None:
        """Return a client's record, or None."""
        return self._packed.get(client)

    def put(self, client: int, packed: dict[str, Any], version: int, keep: tuple[int, ...] = ()) -> None:
        """Replace a client's record."""
        self._packed[client] = packed

    def forget(self, client: int) -> None:
        """Delete a client's record."""
        self._packed.pop(client, None)


def _nominal_sizes(data: Any) -> Sequence[int]:
    """Return the number of training samples of each client; only data that cannot tell without is loaded."""
    for name in ("client_sizes", "batch_size"):
        if getattr(data, name, None) is None:
            raise InvalidOption(f"`data` is a {type(data).__name__} without `{name}`, which `profile` needs.")
    if len(data.client_sizes) == data.num_clients and min(data.client_sizes) < 1:
        data.prepare_data()
        data.setup("fit")
    sizes: Sequence[int] = data.client_sizes
    if len(sizes) != data.num_clients or min(sizes) < 1:
        raise InvalidOption(
            f"`data.client_sizes` starts with {list(sizes[:3])}; `profile` needs the training samples of each of the "
            f"{data.num_clients} clients: pass them to the {type(data).__name__}, or call its `setup()` first."
        )
    return sizes


def _flat(costs: Costs, charge: Charge) -> dict[str, float]:
    down, up = charge.downlink_bytes, charge.uplink_bytes
    return {
        "paper.flops": costs.flops_paper,
        "paper.downlink_bytes": costs.bytes_down_paper,
        "paper.uplink_bytes": costs.bytes_up_paper,
        "paper.bytes": costs.bytes_down_paper + costs.bytes_up_paper,
        "analytic.flops": costs.flops_analytic,
        "wire.downlink_bytes": down,
        "wire.uplink_bytes": up,
        "wire.bytes": down + up,
        "wire.mask_bytes": charge.mask_bytes,
    }
