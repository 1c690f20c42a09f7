"""What a run will cost, without training and without the data.

The algorithm's own code runs: client-rounds at several points of the run are rehearsed by a client that takes one
step on no data. The messages are real, so their sizes are what the wire will see, with two exceptions. The metrics
that a real client adds, some 20 bytes each, are missing. And gradients are noise: a mask that follows them moves
further than in training, where dropped weights tend to return, so its bytes are rather too many. And nothing is
learnt from a client-round (`observe`): a bandit chooses each time as it does at first.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, Split
from lightning_sparsefl.federated.exchange.flat import FlatModule, Layout
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews
from lightning_sparsefl.federated.local.buffers import drop_local_buffers
from lightning_sparsefl.federated.local.engines import LocalOptions
from lightning_sparsefl.federated.local.example_input import layers_of, units_of
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.coordinator import Workload
from lightning_sparsefl.federated.sampling import split_unseen, uniform_cohort
from lightning_sparsefl.report import print_table, quantity
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.masks import apply, counts, density, intersect, same
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.types import (
    ClientView,
    Costs,
    FitResult,
    LayerFlops,
    Masks,
    Message,
    ServerState,
    Shared,
    Weights,
)
from lightning_sparsefl.wire import Codec, Size

_PHASES, _SCHEDULED_PHASES = 4, 20
"""The run is cut into as many equal parts, more if a schedule moves the server's masks; the middle round of each
stands for all of it."""
_NAME_WIDTH = 34
"""So that the table of layers fits into 80 columns."""
_ROWS = {
    "training FLOPs": ("flops", "FLOP"),
    "bytes down": ("downlink_bytes", "B"),
    "bytes up": ("uplink_bytes", "B"),
    "bytes, both ways": ("bytes", "B"),
    "  of these, masks": ("mask_bytes", "B"),
}
_COLUMNS = ("paper", "analytic", "wire")


class Rehearsal:
    """Stands in for local training: all that may change takes one step, and gradients are noise.

    Args:
        layout: Of the model.
        seed: Of the noise, which no two gradients share.
        find_units: Finds the model's units.
    """

    def __init__(self, layout: Layout, seed: int, find_units: Callable[[], Sequence[UnitGroup]] = tuple) -> None:
        self.layout, self._rng, self._find_units = layout, generator(seed, "rehearsal"), find_units

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
        """A step that is nowhere 0: a tensor of zeros would be encoded in fewer bytes than a trained one."""
        masks = masks if units is None else intersect(masks, unit_masks(self.units, units, weights))
        moved = {n: torch.where(trainable[n], w + 1e-3, w) if n in trainable else w + 1e-3 for n, w in weights.items()}
        return FitResult(weights=apply(moved, masks), metrics={}, steps=1, callbacks=callbacks)

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Noise, so that a search moves its mask."""
        names = [name for name in self.layout.names if name not in self.layout.buffers]
        return {name: torch.randn(self.layout.shapes[name], generator=self._rng) for name in names}

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """No data, no scores."""
        return {}


@dataclass(frozen=True)
class Profile:
    """Counts of a run; bytes and FLOPs as plain numbers."""

    content: Mapping[str, Any]
    """As `to_json` writes it."""

    def to_json(self) -> str:
        """The whole profile as JSON."""
        return json.dumps(self.content, indent=2)

    def print(self) -> None:
        """Tables for a person."""
        content = self.content
        print_table(
            f"{content['algorithm']}: {content['parameters']:,} parameters, density {content['density']:.4f}",
            ("tensor", "elements", "density", "forward MFLOPs"),
            list(_layer_rows(content)),
        )
        if "final_density" in content:
            print(f"The server's masks keep {content['final_density']:.4%} of their layers after the last round.")
        cohorts = f"{content['rounds']:,} rounds, {content['client_rounds']:,} client-rounds"
        for title, costs in (("One client-round, mean", content["client_round"]), (cohorts, content["run"])):
            rows = [(label, *(_cell(costs[c], *what) for c in _COLUMNS)) for label, what in _ROWS.items()]
            print_table(title, ("", *_COLUMNS), rows)


def _layer_rows(content: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    counted = 0.0
    for name, layer in content["layers"].items():
        counted += layer["flops"]
        yield _short(name), f"{layer['size']:,}", f"{layer['density']:.4f}", f"{layer['flops'] / 1e6:,.3f}"
    rest = content["forward_flops"] - counted
    if rest > 1:
        yield "(products without a weight)", "", "", f"{rest / 1e6:,.3f}"
    density = content["kept"] / content["parameters"]
    yield "total", f"{content['parameters']:,}", f"{density:.4f}", f"{content['forward_flops'] / 1e6:,.3f}"


def _short(name: str) -> str:
    """A name without its middle, if it is long: layers differ at their ends."""
    return name if len(name) <= _NAME_WIDTH else f"{name[:8]}..{name[10 - _NAME_WIDTH :]}"


def _cell(column: Mapping[str, float], key: str, unit: str) -> str:
    return quantity(column[key], unit) if key in column else ""


def profile(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    module: LightningModule,
    data: Any,
    options: LocalOptions,
    max_rounds: int,
    seed: int,
) -> Profile:
    """Count a run.

    Args:
        algorithm: The method.
        federation: Who takes part.
        module: The user's module; it stays as it is.
        data: With `sample_shape`, `batch_size` and `client_sizes`, its data need not be on disk.
        options: Of local training.
        max_rounds: Of the run.
        seed: Of the run; the cohorts follow from it.

    Raises:
        InvalidOption: If the data does not say how many training samples each client has, or its batch size.
    """
    sizes = _nominal_sizes(data)
    module = copy.deepcopy(module)
    algorithm.adapt(module)
    layers = layers_of(module, data)
    flat = FlatModule(module)
    training, _ = split_unseen(seed, len(sizes), federation.unseen_clients)
    capacities = federation.fleet_capacities(len(sizes), seed)

    def view(client: int) -> ClientView:
        return ClientView(
            id=client,
            num_examples=sizes[client],
            capacity=capacities[client],
            round=0,
            max_rounds=max_rounds,
            seed=seed,
            monitor=federation.monitor,
        )

    views, weights = LazyClientViews(training, view), flat.read()
    stage = Rehearsal(flat.layout, seed, lambda: units_of(module, data))
    fleet = Fleet(
        views,
        flat.layout.buffers,
        weights.vector.device,
        stage,
        lambda i: Client(view(i), {}, stage),
        clients_per_round=federation.clients_per_round,
        execution=federation.execution,
    )
    server = algorithm.init(weights, fleet)
    workload = Workload(
        layers,
        options.max_epochs,
        data.batch_size,
        options.limit_train_batches,
        getattr(data, "drop_last", False),
        flat.layout.buffers,
        stage,
    )
    rehearsals = _Rehearsals(algorithm, federation, stage, Codec(weights), server)
    scheduled = type(algorithm).profile_state is not FederatedAlgorithm.profile_state
    parts = _parts(views, federation.clients_per_round, _SCHEDULED_PHASES if scheduled else _PHASES)
    total = _total(algorithm, workload, rehearsals, views, parts)
    return Profile(
        {
            "algorithm": type(algorithm).__name__,
            **_model_facts(flat.layout, layers, algorithm.download(server, views[0])),
            "rounds": max_rounds,
            **({"final_density": density(algorithm.profile_state(server, max_rounds).masks)} if scheduled else {}),
            **_columns(total, max_rounds * federation.clients_per_round),
        }
    )


def _nominal_sizes(data: Any) -> Sequence[int]:
    """Training samples of each client."""
    for name in ("client_sizes", "batch_size"):
        if getattr(data, name, None) is None:
            raise InvalidOption(f"`data` is a {type(data).__name__} without `{name}`, which `profile` needs.")
    sizes: Sequence[int] = data.client_sizes
    if len(sizes) != data.num_clients or min(sizes) < 1:
        raise InvalidOption(
            f"`data.client_sizes` starts with {list(sizes[:3])}; `profile` needs the training samples of each of the "
            f"{data.num_clients} clients: give them to the {type(data).__name__}, or call its `setup()` first."
        )
    return sizes


class _Part(NamedTuple):
    """Client-rounds whose messages weigh the same."""

    middle: int
    """The middle round of the part of the run that it stands for."""
    again: bool
    """Whether the client took part before."""
    capacity: float


def _parts(views: Sequence[ClientView], clients_per_round: int, phases: int) -> dict[_Part, Counter[int]]:
    """How many client-rounds of each part fall on clients of each size; the cohorts are those of the run."""
    parts: dict[_Part, Counter[int]] = defaultdict(Counter)
    seen: set[int] = set()
    rounds, seed = views[0].max_rounds, views[0].seed
    middles = _middles(rounds, phases)
    for number in range(rounds):
        for place in uniform_cohort(seed, number, range(len(views)), clients_per_round):
            view = views[place]
            parts[_Part(middles[number], view.id in seen, view.capacity)][view.num_examples] += 1
            seen.add(view.id)
    return dict(sorted(parts.items()))


def _middles(rounds: int, phases: int) -> list[int]:
    """For each round, the middle one of its part of the run."""
    parts = [number * min(phases, rounds) // rounds for number in range(rounds)]
    sizes, firsts = Counter(parts), {part: number for number, part in reversed(list(enumerate(parts)))}
    return [firsts[part] + (sizes[part] - 1) // 2 for part in parts]


@dataclass(frozen=True)
class _Kept:
    """What server and client know from the client's last rehearsal."""

    shared: Shared = field(default_factory=dict)
    memory: Shared = field(default_factory=dict)
    held: Masks | None = None


class _Rehearsals:
    """Rehearses client-rounds, in the order of the run."""

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        federation: Federation,
        stage: Rehearsal,
        codec: Codec,
        server: ServerState,
    ) -> None:
        self.algorithm, self.federation, self.stage = algorithm, federation, stage
        self.codec, self.server = codec, server
        self._kept: dict[float, _Kept] = {}

    def rehearse(self, part: _Part, view: ClientView) -> tuple[ClientView, Message, Size, Size]:
        """What one client-round of a part sends.

        Args:
            part: Comes after those that are earlier in the run.
            view: Of a client of its capacity.

        Returns:
            The client in the part's middle round, what it receives, and what the message and its update weigh.
        """
        before = self._kept[part.capacity] if part.again else _Kept()
        view = replace(view, round=part.middle, shared=before.shared)
        message = self.algorithm.download(self.algorithm.profile_state(self.server, part.middle), view)
        known = message.masks if before.held is not None and same(before.held, message.masks) else None
        trained = self.algorithm.train(message, Client(view, before.memory, self.stage))
        update, _ = drop_local_buffers(trained, message, self.federation.buffers, self.stage.layout)
        shared = before.shared if update.shared is None else update.shared
        memory = before.memory if update.memory is None else update.memory
        self._kept[part.capacity] = _Kept(shared, memory, (update.shared or {}).get("masks", message.masks))
        return view, message, self.codec.message_size(message, known), self.codec.update_size(update, message)


def _total(
    algorithm: FederatedAlgorithm,
    workload: Workload,
    rehearsals: _Rehearsals,
    views: Sequence[ClientView],
    parts: Mapping[_Part, Mapping[int, int]],
) -> dict[str, float]:
    """All client-rounds, by ``column.key``.

    Counting what masks keep is slow, so clients of other sizes are asked anew only where the first client of the
    capacity would pay something else than before.
    """
    clients = {view.capacity: view for view in reversed(views)}
    known: dict[tuple[Costs, float, int], Costs] = {}
    total: dict[str, float] = defaultdict(int)
    for part, client_rounds in parts.items():
        view, message, down, up = rehearsals.rehearse(part, clients[part.capacity])
        first = algorithm.costs(replace(workload.facts(view, message), again=part.again))
        for size, times in client_rounds.items():
            key = first, part.capacity, size
            if key not in known:
                facts = workload.facts(replace(view, num_examples=size), message)
                known[key] = algorithm.costs(replace(facts, again=part.again))
            for name, value in _flat(known[key], down, up).items():
                total[name] += times * value
    return total


def _flat(costs: Costs, down: Size, up: Size) -> dict[str, float]:
    return {
        "paper.flops": costs.flops_paper,
        "paper.downlink_bytes": costs.bytes_down_paper,
        "paper.uplink_bytes": costs.bytes_up_paper,
        "paper.bytes": costs.bytes_down_paper + costs.bytes_up_paper,
        "analytic.flops": costs.flops_analytic,
        "wire.downlink_bytes": down.total,
        "wire.uplink_bytes": up.total,
        "wire.bytes": down.total + up.total,
        "wire.mask_bytes": down.masks + up.masks,
    }


def _columns(total: Mapping[str, float], client_rounds: int) -> dict[str, Any]:
    """The run and its mean client-round, by column, then by key."""
    run: dict[str, dict[str, float]] = {column: {} for column in _COLUMNS}
    for name, value in total.items():
        column, key = name.split(".")
        run[column][key] = value
    mean = {column: {key: value / client_rounds for key, value in costs.items()} for column, costs in run.items()}
    return {"client_rounds": client_rounds, "client_round": mean, "run": run}


def _model_facts(layout: Layout, layers: Sequence[LayerFlops], message: Message) -> dict[str, Any]:
    """Sizes, densities and forward FLOPs of what the first client receives first."""
    sizes = {name: layout.shapes[name].numel() for name in layout.names if name not in layout.buffers}
    held = counts({name: mask for name, mask in message.masks.items() if name in sizes})
    kept = sizes | held
    masks = {name: message.masks[name] for name in held}
    flops = {layer.weight: forward_flops([layer], masks) for layer in layers if layer.weight}
    return {
        "parameters": sum(sizes.values()),
        "kept": sum(kept.values()),
        "density": sum(held.values()) / sum(sizes[name] for name in held) if held else 1.0,
        "forward_flops": forward_flops(layers, masks),
        "layers": {
            name: {"size": size, "density": kept[name] / max(1, size), "flops": flops.get(name, 0.0)}
            for name, size in sizes.items()
        },
    }
