"""Estimate of the costs of a run without training and without data.

The code of the algorithm itself runs: client-rounds at several points of the run are simulated by a client that takes
one step without data. The messages are real, so their sizes are those of the run, with five exceptions. Metrics of
real clients, some 20 bytes each, are missing. Gradients are noise, so that a mask that depends on them changes more
than in training, where dropped weights tend to return; its bytes are overestimated. A step moves all weights alike, so
that a mask that follows the order of weights hardly changes; its bytes are underestimated. Scores are the highest
possible, so that a method that waits for one waits for the shortest time. The server does not learn from client-rounds
(`observe`), so that a bandit always chooses as in the first round. Densities and capacities that a method draws at
random, as FedLPS does, are drawn once for each part of the run and each capacity of the federation, so that the costs
of such a run are rough. With `federation.redraw_capacities` the capacities are those of the run, but a simulated client
keeps its masks, which a real one gets anew when its capacity changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.plugins import Precision
from lightning.pytorch import LightningModule

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.commands.cost_tables import COLUMNS, Profile
from lightning_sparsefl.federated.commands.simulation import Part, Simulation, Work
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar
from lightning_sparsefl.sparse.masks import counts, density
from lightning_sparsefl.types import LayerFlops, Message, RunState, ServerState

_PHASES, _SCHEDULED_PHASES = 4, 20
"""Numbers of equal parts of the run, without and with a schedule of the server's masks; each part is represented by
its middle round."""


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
    simulation = Simulation(options, module, data, precision, phases)
    algorithm, server = options.algorithm, simulation.server
    first, last = simulation.first, options.max_rounds
    scheduled = type(algorithm).profile_state is not FederatedAlgorithm.profile_state
    parts = _parts(simulation, _SCHEDULED_PHASES if scheduled else _PHASES)
    simulation.fix_capacities()
    total = simulation.total(parts)
    view = server.with_neighbours(first.server, server.view(server.training_clients[0], 0))
    message = algorithm.download(first.server, view)
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


def _parts(simulation: Simulation, phases: int) -> dict[Part, Counter[Work]]:
    """Count the client-rounds of each part by the work of the client, for the cohorts of the run."""
    parts: dict[Part, Counter[Work]] = defaultdict(Counter)
    seen: set[int] = set()
    server = simulation.server
    middles = _middles(server.max_rounds, phases, server.algorithm.follows_length)
    for number in range(server.max_rounds):
        for client in server.draw.cohort(RunState(ServerState(number, {}))).trained:
            about = server.about.of(client, number)
            part = Part(middles[number], client in seen, about.capacity, simulation.kind(client))
            parts[part][Work(about.num_examples, about.local_epochs, server.workload.batching(client))] += 1
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


def _columns(total: Mapping[str, float], client_rounds: int) -> dict[str, Any]:
    """Return the costs of the run and of its mean client-round, by column and key."""
    run: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
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
