"""What a run will cost, without training and without the data.

The algorithm's own code runs: one client-round is rehearsed by a client that returns what it received. The messages
are real, so their sizes are the sizes that the wire will see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, Split
from lightning_sparsefl.federated.coordinator import Workload
from lightning_sparsefl.federated.flat import FlatModule, Layout
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.local import LocalOptions
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.sampling import uniform_cohort
from lightning_sparsefl.report import print_table, quantity
from lightning_sparsefl.sparse.masks import apply, same
from lightning_sparsefl.types import ClientView, Costs, FitResult, LayerFlops, Masks, Message, ServerState, Weights
from lightning_sparsefl.wire import Codec, Size


def layers_of(module: LightningModule, data: Any) -> tuple[LayerFlops, ...]:
    """The module's layers; none, with a warning, where its forward pass cannot be traced.

    Args:
        module: Its `example_input_array` is used if it has one, else zeros of the data's `sample_shape`.
        data: The clients' data.
    """
    sample = module.example_input_array
    shape = getattr(data, "sample_shape", None)
    if sample is None and shape is not None:
        sample = torch.zeros(1, *shape)
    if sample is None:
        rank_zero_warn("FLOPs are not counted: the data has no `sample_shape` and the module no `example_input_array`.")
        return ()
    try:
        return count_layers(module, sample)
    except Exception as error:
        rank_zero_warn(
            f"FLOPs are not counted: `{type(module).__name__}.forward` fails on one sample "
            f"({type(error).__name__}: {error}); set its `example_input_array`."
        )
        return ()


class Rehearsal:
    """Stands in for local training: weights come back as they were, gradients are noise.

    Args:
        layout: Of the model.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def fit(
        self, client: Client, weights: Weights, masks: Masks, trainable: Masks, callbacks: Sequence[Callback]
    ) -> FitResult:
        """What was received, masked."""
        return FitResult(weights=apply(weights, masks), metrics={}, steps=0, callbacks=callbacks)

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Noise, so that a search moves its mask."""
        rng = client.rng("rehearsal")
        names = [name for name in self.layout.names if name not in self.layout.buffers]
        return {name: torch.randn(self.layout.shapes[name], generator=rng) for name in names}

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """No data, no scores."""
        return {}


@dataclass(frozen=True)
class ClientRound:
    """One client's round, rehearsed."""

    costs: Costs
    down: Size
    up: Size


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
            ("layer", "weights", "density", "MFLOPs forward, one sample"),
            [
                (name, f"{layer['size']:,}", f"{layer['density']:.4f}", f"{layer['flops'] / 1e6:.3f}")
                for name, layer in content["layers"].items()
            ],
        )
        rows = [
            (f"{label}, {what}", *(_cell(content[part].get(column, {}), what) for column in ("analytic", "paper", "wire")))
            for part, label in (("client_round", "one client-round"), ("run", f"the run ({content['client_rounds']:,} client-rounds)"))
            for what in ("training FLOPs", "bytes down", "bytes up", "bytes")
        ]
        print_table("Costs", ("", "hardware", "paper", "wire"), rows)


def _cell(column: Mapping[str, float], what: str) -> str:
    key, unit = {
        "training FLOPs": ("flops", "FLOP"),
        "bytes down": ("downlink_bytes", "B"),
        "bytes up": ("uplink_bytes", "B"),
        "bytes": ("bytes", "B"),
    }[what]
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
        module: The user's module.
        data: With `sample_shape`, `batch_size` and `client_sizes`, its data need not be on disk.
        options: Of local training.
        max_rounds: Of the run.
        seed: Of the run; the cohorts follow from it.
    """
    if not hasattr(data, "client_sizes"):
        raise InvalidOption(f"`data` is a {type(data).__name__} without `client_sizes`; `profile` needs the nominal sizes.")
    algorithm.adapt(module)
    layers = layers_of(module, data)
    flat = FlatModule(module)
    workload = Workload(layers, options.max_epochs, data.batch_size, options.limit_train_batches)
    views = [
        ClientView(i, data.client_sizes[i], federation.capacity(i), 0, max_rounds, seed) for i in range(data.num_clients)
    ]
    weights = flat.read()
    server = algorithm.init(weights, Fleet(views, flat.layout.buffers, weights.vector.device))
    return _Profiler(algorithm, federation, flat.layout, workload, Codec(weights), server).run(views, max_rounds)


class _Profiler:
    """Rehearses client-rounds and adds them up."""

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        federation: Federation,
        layout: Layout,
        workload: Workload,
        codec: Codec,
        server: ServerState,
    ) -> None:
        self.algorithm, self.federation, self.layout = algorithm, federation, layout
        self.workload, self.codec, self.server = workload, codec, server

    def run(self, views: Sequence[ClientView], max_rounds: int) -> Profile:
        """Every round's cohort is drawn as in the run; clients of one size and capacity cost the same."""
        rehearsed: dict[tuple[int, float, bool], ClientRound] = {}
        seen: set[int] = set()
        total: dict[str, float] = {}
        for number in range(max_rounds):
            for i in uniform_cohort(views[0].seed, number, len(views), self.federation.clients_per_round):
                kind = (views[i].num_examples, views[i].capacity, i in seen)
                if kind not in rehearsed:
                    rehearsed[kind] = self._rehearse(views[i], again=i in seen)
                seen.add(i)
                for name, value in _flat(rehearsed[kind]).items():
                    total[name] = total.get(name, 0) + value
        client_rounds = max_rounds * self.federation.clients_per_round
        message = self.algorithm.download(self.server, views[0])
        mean = {name: value / client_rounds for name, value in total.items()}
        return Profile(self._content(message, client_rounds, _nested(mean), _nested(total)))

    def _rehearse(self, view: ClientView, again: bool) -> ClientRound:
        """A client's first round, or a later one, for which what it uploaded first is known."""
        shared: Mapping[str, Any] = {}
        held: Masks | None = None
        for attempt in range(2 if again else 1):
            now = replace(view, shared=shared, round=attempt)
            message = self.algorithm.download(self.server, now)
            known = message.masks if held is not None and same(held, message.masks) else None
            update = self.algorithm.train(message, Client(now, {}, Rehearsal(self.layout)))
            down, up = self.codec.message_size(message, known), self.codec.update_size(update, message)
            shared = shared if update.shared is None else update.shared
            held = shared.get("masks", message.masks)
        return ClientRound(self.algorithm.costs(self.workload.facts(now, message)), down, up)

    def _content(self, message: Message, client_rounds: int, mean: Any, total: Any) -> dict[str, Any]:
        parameters = [name for name in self.layout.names if name not in self.layout.buffers]
        sizes = {name: self.layout.shapes[name].numel() for name in parameters}
        kept = {n: int(message.masks[n].sum()) if n in message.masks else sizes[n] for n in parameters}
        masked = [name for name in parameters if name in message.masks]
        flops = {layer.weight: layer for layer in self.workload.layers}
        return {
            "algorithm": type(self.algorithm).__name__,
            "parameters": sum(sizes.values()),
            "kept": sum(kept.values()),
            "density": sum(kept[n] for n in masked) / sum(sizes[n] for n in masked) if masked else 1.0,
            "layers": {
                name: {
                    "size": sizes[name],
                    "density": kept[name] / sizes[name],
                    "flops": 2 * flops[name].macs * kept[name] / sizes[name] + flops[name].bias if name in flops else 0,
                }
                for name in parameters
            },
            "client_rounds": client_rounds,
            "client_round": mean,
            "run": total,
        }


def _flat(client_round: ClientRound) -> dict[str, float]:
    costs, down, up = client_round.costs, client_round.down, client_round.up
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


def _nested(flat: Mapping[str, float]) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {}
    for name, value in flat.items():
        column, key = name.split(".")
        nested.setdefault(column, {})[key] = value
    return nested
