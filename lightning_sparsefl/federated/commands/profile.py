"""Estimate of the costs of a run without training and without data.

The code of the algorithm itself runs: client-rounds at several points of the run are simulated by a client that takes
one step without data. The messages are real, so their sizes are those of the run, with four exceptions. Metrics of
real clients, some 20 bytes each, are missing. Gradients are noise, so that a mask that depends on them changes more
than in training, where dropped weights tend to return; its bytes are overestimated. Scores are the highest possible, so
that a method that waits for one waits for the shortest time. The server does not learn from client-rounds (`observe`),
so that a bandit always chooses as in the first round. Densities and capacities that a method draws at random, as FedLPS
does, are drawn once for each part of the run and each capacity of the federation, so that the costs of such a run are
rough. With `federation.redraw_capacities` the capacities are those of the run, but a simulated client keeps its masks,
which a real one gets anew when its capacity changes.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import Precision
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks import StepMeter
from lightning_sparsefl.cost import Charge, Ledger, forward_flops
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, CoverageMean
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.flat import FlatModule, Layout
from lightning_sparsefl.federated.exchange.orders import Order, Split
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews
from lightning_sparsefl.federated.local.example_input import layers_of, units_of
from lightning_sparsefl.federated.local.node import Node, NodeOptions
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.about import About, AboutClients, AllAbout
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.rounds.workload import Batching, Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import split_unseen
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.federated.storage.records import ServerRecord
from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar
from lightning_sparsefl.report import print_line, print_table, quantity
from lightning_sparsefl.report.tables import NOT_COUNTED
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.masks import apply, counts, density, intersect
from lightning_sparsefl.sparse.parts import embeddings_of, norms_of
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.types import (
    ClientView,
    Costs,
    FitResult,
    LayerFlops,
    Masks,
    Merged,
    Message,
    RunState,
    ServerState,
    Weights,
)
from lightning_sparsefl.wire import Codec

_PHASES, _SCHEDULED_PHASES = 4, 20
"""Numbers of equal parts of the run, without and with a schedule of the server's masks; each part is represented by
its middle round."""
_NAME_WIDTH = 34
"""Width of names with which the table of layers fits into 80 columns."""
_ROWS = {
    "training FLOPs": ("flops", "FLOP"),
    "bytes down": ("downlink_bytes", "B"),
    "bytes up": ("uplink_bytes", "B"),
    "bytes, both ways": ("bytes", "B"),
    "  of these, masks": ("mask_bytes", "B"),
}
_COLUMNS = ("paper", "analytic", "wire")
_LEGEND = """\
The tensors are those of a client's first message, and forward MFLOPs are those
of one sample. A client-round is the work of one client in one round; the last
table is the sum over all of them. Bytes down go to clients, bytes up come back.
  paper     by the formula of the method's paper, or else by the kept weights
  analytic  operations of training with the weights that masks keep
  wire      sizes of encoded messages, without the values that clients log
An empty cell is a cost that its column does not count."""
_ESTIMATE = """\
Masks that depend on gradients are simulated with noise, which changes them more
than training does: their bytes on the wire are upper estimates."""


class SimulatedWorker:
    """Substitute for local training, in which all trainable weights take one step and gradients are noise.

    Args:
        layout: Layout of the model.
        initial: Initial weights of the model.
        seed: Random seed of the noise, which differs between gradients.
        find_units: Function that returns the units of the model.
        norms: Names of the tensors of the model's norms.
        exits: Early exits of the model by the last module of each block.
        embeddings: Names of the tensors of the model's embeddings.
    """

    def __init__(
        self,
        layout: Layout,
        initial: Weights,
        seed: int,
        find_units: Callable[[], Sequence[UnitGroup]] = tuple,
        norms: frozenset[str] = frozenset(),
        exits: Mapping[str, str] | None = None,
        embeddings: frozenset[str] = frozenset(),
    ) -> None:
        self.layout, self.initial, self.buffers, self.norms = layout, initial, layout.buffers, norms
        self._rng, self._find_units = generator(seed, "rehearsal"), find_units
        self.exits, self.embeddings = dict(exits or {}), embeddings

    @cached_property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units."""
        return self._find_units()

    def fit(
        self,
        client: Client,
        weights: Weights,
        masks: Masks,
        trainable: Masks,
        callbacks: Sequence[Callback],
        *,
        epochs: int | None = None,
        units: Masks | None = None,
    ) -> FitResult:
        """Take a step that is nonzero everywhere, since zeros would be encoded in fewer bytes than trained weights.

        The arguments are those of :meth:`Client.fit`.
        """
        for meter in callbacks:
            if isinstance(meter, StepMeter):  # a client without a step would send nothing
                meter.count({"lr": 1.0})
        weights = {**self.initial, **weights}
        masks = masks if units is None else intersect(masks, unit_masks(self.units, units, weights))
        moved = {n: torch.where(trainable[n], _step(w), w) if n in trainable else _step(w) for n, w in weights.items()}
        return FitResult(weights=apply(moved, masks), metrics={}, steps=1, callbacks=callbacks)

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Return noise as the gradient, so that a search changes its mask.

        Args:
            client: Ignored.
            weights: Ignored.
        """
        names = [name for name in self.layout.names if name not in self.layout.buffers]
        return {n: torch.randn(self.layout.shapes[n], generator=self._rng).to(self.layout.dtypes[n]) for n in names}

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """Return scores that are the highest possible whatever their name, since there is no data.

        A method that waits for a score waits for the shortest time.

        Args:
            client: Ignored.
            weights: Ignored.
            split: Ignored.
        """
        return _HighestScores()


def _step(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor after a small step, which is not lost to rounding in half precision either."""
    return weight + 1e-3 + 2 * torch.finfo(weight.dtype).eps * weight.abs()


class _HighestScores(dict[str, float]):
    """No metrics, of which each that is asked for is infinite."""

    def __missing__(self, name: str) -> float:
        return math.inf


@dataclass(frozen=True)
class Profile:
    """Estimated costs of a run in bytes and FLOPs."""

    content: Mapping[str, Any]
    """Content that `to_json` writes."""

    def to_json(self) -> str:
        """Return the complete profile as JSON."""
        return json.dumps(self.content, indent=2)

    def print(self) -> None:
        """Print the profile as tables."""
        content = self.content
        print_table(
            f"{content['algorithm']}: {content['parameters']:,} parameters, density {content['density']:.4f}",
            ("tensor", "elements", "density", "forward MFLOPs"),
            list(_layer_rows(content)),
        )
        if "final_density" in content:
            print_line(f"The server's masks keep {content['final_density']:.4%} of their layers after the last round.")
        cohorts = f"{content['rounds']:,} rounds, {content['client_rounds']:,} client-rounds"
        for title, costs in (("One client-round, mean", content["client_round"]), (cohorts, content["run"])):
            rows = [(label, *(_cell(costs, column, *what) for column in _COLUMNS)) for label, what in _ROWS.items()]
            print_table(title, ("", *_COLUMNS), rows)
        if "sampler" in content:
            print_line(f"Cohorts are drawn uniformly here, not by {content['sampler']}.")
        print_line(f"\n{_LEGEND}" + (f"\n{_ESTIMATE}" if content["run"]["wire"]["mask_bytes"] else ""))


def _layer_rows(content: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    counted = 0.0
    for name, layer in content["layers"].items():
        counted += layer.get("flops", 0.0)
        yield _short(name), f"{layer['size']:,}", f"{layer['density']:.4f}", _megaflops(layer.get("flops"))
    total = content.get("forward_flops")
    if total is not None and total - counted > 1:
        yield "(products without a weight)", "", "", _megaflops(total - counted)
    density = content["kept"] / content["parameters"]
    yield "total", f"{content['parameters']:,}", f"{density:.4f}", _megaflops(total)


def _megaflops(flops: float | None) -> str:
    return NOT_COUNTED if flops is None else f"{flops / 1e6:,.3f}"


def _short(name: str) -> str:
    """Return a name without its middle if it is long, since names of layers differ at their ends."""
    return name if len(name) <= _NAME_WIDTH else f"{name[:8]}..{name[10 - _NAME_WIDTH :]}"


def _cell(costs: Mapping[str, Mapping[str, float]], column: str, key: str, unit: str) -> str:
    if key in costs[column]:
        return quantity(costs[column][key], unit)
    return NOT_COUNTED if key == "flops" and column != "wire" else ""


def profile(options: RunOptions, module: LightningModule, data: Any, precision: Precision) -> Profile:
    """Estimate the costs of a run; nothing is written.

    Args:
        options: Options of the run.
        module: Module of the user; it is not changed.
        data: Data module of the clients. With `sample_shape`, `batch_size` and `client_sizes`, its data need not be on
            disk.
        precision: Precision of the run.

    Raises:
        InvalidOption: If the data module has no batch size or no numbers of training samples of the clients.
    """
    bar = next((each for each in options.callbacks if isinstance(each, RoundProgressBar)), None)
    phases = PhaseProgress(shown=False) if bar is None else bar.phases
    simulation = _Simulation(options, module, data, precision, phases)
    algorithm, server = options.algorithm, simulation.server
    first, last = simulation.first, options.max_rounds
    scheduled = type(algorithm).profile_state is not FederatedAlgorithm.profile_state
    parts = _parts(simulation, _SCHEDULED_PHASES if scheduled else _PHASES)
    fixed = {client: capacity for (capacity, _), client in simulation.representatives.items()}
    server.about = _Representing(server.about, fixed)
    total = simulation.total(parts)
    message = algorithm.download(first.server, server.view(server.training_clients[0], 0))
    final = algorithm.profile_state(first.server, last).masks
    return Profile(
        {
            "algorithm": type(algorithm).__name__,
            **_model_facts(server.layout, server.workload.layers, message),
            "rounds": last,
            **_sampler_fact(options.federation),
            **({"final_density": density(final)} if scheduled and final else {}),
            **_columns(_counted(total, server), last * options.federation.clients_per_round),
        }
    )


def _sampler_fact(federation: Federation) -> dict[str, str]:
    """Return the sampler, unless it is uniform."""
    return {} if federation.sampler in (None, Uniform()) else {"sampler": repr(federation.sampler)}


def _counted(total: Mapping[str, float], server: Server) -> dict[str, float]:
    """Return the costs without FLOPs if these are not counted."""
    return {name: cost for name, cost in total.items() if server.ledger.counts_flops or not name.endswith(".flops")}


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


class _Part(NamedTuple):
    """A group of client-rounds whose messages have the same size."""

    middle: int
    """Middle round of the part of the run."""
    again: bool
    """Whether the client participated before."""
    capacity: float
    kind: Hashable
    """What clients of equal costs have in common besides (`FederatedAlgorithm.equal_costs`)."""


class _Work(NamedTuple):
    """What the costs of a client-round depend on, and the sizes of its messages do not."""

    num_examples: int
    local_epochs: int | None
    batching: Batching


def _parts(simulation: _Simulation, phases: int) -> dict[_Part, Counter[_Work]]:
    """Count the client-rounds of each part by the work of the client, for the cohorts of the run."""
    parts: dict[_Part, Counter[_Work]] = defaultdict(Counter)
    seen: set[int] = set()
    server = simulation.server
    middles = _middles(server.max_rounds, phases, server.algorithm.follows_length)
    for number in range(server.max_rounds):
        for client in server.cohort(RunState(ServerState(number, {}))).trained:
            about = server.about.of(client, number)
            part = _Part(middles[number], client in seen, about.capacity, simulation.kind(client))
            parts[part][_Work(about.num_examples, about.local_epochs, server.workload.batching(client))] += 1
            seen.add(client)
    return dict(sorted(parts.items(), key=lambda item: (item[0].middle, item[0].again, item[0].capacity)))


def _middles(rounds: int, phases: int, ends: bool) -> list[int]:
    """Return for each round the middle round of its part of the run.

    Args:
        rounds: Number of rounds.
        phases: Number of parts.
        ends: Whether the last round is a part of its own, since a schedule of the clients ends there.
    """
    if ends and rounds > 1:
        return [*_middles(rounds - 1, phases, ends=False), rounds - 1]
    parts = [number * min(phases, rounds) // rounds for number in range(rounds)]
    sizes, firsts = Counter(parts), {part: number for number, part in reversed(list(enumerate(parts)))}
    return [firsts[part] + (sizes[part] - 1) // 2 for part in parts]


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


class _Simulation:
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
        known = (lambda: units_of(module, data), norms_of(module), getattr(module, "exits", {}), embeddings_of(module))
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
        self.first = RunState(options.algorithm.init(weights, self._fleet(weights, worker)))
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
        return server.algorithm.equal_costs(self.first.server, server.view(client, 0, ServerRecord()))

    def _representatives(self, clients: Sequence[int]) -> dict[tuple[float, Hashable], int]:
        """Return a client for each capacity and kind: the first one that has them."""
        federation = self.server.federation
        if federation.redraw_capacities:
            each = zip(sorted(set(federation.capacities or [])), clients, strict=False)
            return {(capacity, None): client for capacity, client in each}
        return {(self._about.of(client, 0).capacity, self.kind(client)): client for client in reversed(clients)}

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
            raise answer.error
        (outcome,) = self.server.receive([order], [answer], merge)
        return outcome

    def _simulate(self, part: _Part) -> _Simulated:
        """Simulate one client-round of a part; parts must come in the order of the run."""
        client = self.representatives[part.capacity, part.kind]
        if not part.again:
            self._records.forget(client)
            self._versions.forget(client)
        state = self.server.algorithm.profile_state(self.first.server, part.middle)
        order = self.server.order(replace(self.first, server=state), client, round=part.middle)
        outcome = self._answer(order)
        assert outcome.charge is not None
        assert outcome.record is not None
        self._records.put(client, dict(outcome.record), part.middle + 1)
        return _Simulated(order, outcome.charge)

    def total(self, parts: Mapping[_Part, Mapping[_Work, int]]) -> dict[str, float]:
        """Sum the costs of all client-rounds, by ``column.key``.

        Counting the weights kept by masks is slow, so the costs of clients with other numbers of samples or epochs are
        computed again only if those of the first client of their capacity have changed.

        Args:
            parts: Number of client-rounds by part and by the client's work.
        """
        known: dict[tuple[Costs, float, Hashable, _Work], Costs] = {}
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

    def _view_before(self, part: _Part) -> ClientView:
        """Return the server's view of a part's client before the simulation."""
        client = self.representatives[part.capacity, part.kind]
        record = self.server.record(client) if part.again else ServerRecord()
        return self.server.view(client, part.middle, record)

    def _costs(self, view: ClientView, order: Order, part: _Part, batching: Batching | None = None) -> Costs:
        facts = self.server.workload.facts(view, order.message, batching)
        return self.server.algorithm.costs(replace(facts, again=part.again))


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


def _columns(total: Mapping[str, float], client_rounds: int) -> dict[str, Any]:
    """Return the costs of the run and of its mean client-round, by column and key."""
    run: dict[str, dict[str, float]] = {column: {} for column in _COLUMNS}
    for name, value in total.items():
        column, key = name.split(".")
        run[column][key] = value
    mean = {column: {key: value / client_rounds for key, value in costs.items()} for column, costs in run.items()}
    return {"client_rounds": client_rounds, "client_round": mean, "run": run}


def _model_facts(layout: Layout, layers: Sequence[LayerFlops] | None, message: Message) -> dict[str, Any]:
    """Return sizes, densities and forward FLOPs of the model in a client's first message."""
    sizes = {name: layout.shapes[name].numel() for name in layout.names if name not in layout.buffers}
    held = counts({name: mask for name, mask in message.masks.items() if name in sizes})
    kept = sizes | held
    masks = {name: message.masks[name] for name in held}
    flops = {layer.weight: forward_flops([layer], masks) for layer in layers or () if layer.weight}

    def of_layer(name: str, size: int) -> dict[str, float]:
        facts = {"size": size, "density": kept[name] / max(1, size)}
        return facts if layers is None else {**facts, "flops": flops.get(name, 0.0)}

    return {
        "parameters": sum(sizes.values()),
        "kept": sum(kept.values()),
        "density": sum(held.values()) / sum(sizes[name] for name in held) if held else 1.0,
        **({} if layers is None else {"forward_flops": forward_flops(layers, masks)}),
        "layers": {name: of_layer(name, size) for name, size in sizes.items()},
    }
