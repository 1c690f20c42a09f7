"""DisPFL: Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training.

Dai, Shen, He, Tian, Tao, ICML 2022, arXiv:2206.00187, Algorithms 1 and 2; code: rong-dai/DisPFL.

There is no global model. Each client has a mask m_k and a model w_k. It receives the models of its neighbours in a
graph, takes the mean of each weight over those of them, itself included, whose masks keep it, trains the mean under
m_k, and searches for its next mask as in FedSpa. It is scored with the mean under its mask before training. A dense
model (``density=1, search="static"``) gives D-PSGD (Lian et al. 2017, arXiv:1705.09056).

The engine's server relays the models: it keeps the last one of every client, and sends a client those of its
neighbours. Thus measured download bytes are those of the graph, and an upload is measured once, however many clients
receive it. In the paper's bytes, 4 for each kept weight, a client sends its model as often as it receives one. The
server's own weights stay the initial ones.

Departures from the authors' code:

- In round 0 nobody sends a model, since all have the initial weights, whose mean under m_k is m_k * w_0.
- A client that a round did not draw does not train, and its neighbours go on with its last model. In the code it trains
  its own model, without its neighbours', and on the full graph only the clients of the round are averaged.
- On a ring of two clients the neighbour counts once; the code counts it twice.
- By default only tensors of two or more dimensions are masked; the code masks every parameter: ``mask_pool="all"``.
- Gradients are masked before clipping and before the step; the code masks weights after the step, which is different
  with momentum. Gradients are clipped only with `trainer.gradient_clip_val`, which is 10 in the code.
- Weights grow by the gradient, as in the paper; the code's published script grows them at random.
- Buffers are averaged like the weights that have no masks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_sparsefl.algorithms._mask_search import (
    Growth,
    LayerDensity,
    MaskInit,
    MaskPool,
    layer_counts,
    masked_shapes,
    own_masks,
    searched,
    with_search,
)
from lightning_sparsefl.cost import BYTES_PER_WEIGHT
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.sampling.draws import drawn, numbers_below, within
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.kept_values import held_mean, kept_values, with_zeros
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.masks import counts as kept_by
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Message,
    ServerState,
    Shared,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class DisPFL(FederatedAlgorithm):
    """A sparse model for each client, averaged with those of its neighbours in a graph; there is no global model."""

    has_global_model = False
    uploads_shared = True
    mixes_buffers = True

    topology: Literal["random", "ring", "full"] = "random"
    """Neighbours of a client: others drawn anew in each round, the two beside it by number, or all others."""
    neighbours: int = 10
    """Number of neighbours with ``topology="random"``, at least 1; all others if there are fewer."""
    density: float | Literal["capacity"] = 0.5
    """Fraction of the maskable weights that a client keeps, in (0, 1], or its capacity (`federation.capacities`)."""
    search: Literal["dst", "static"] = "dst"
    """Whether masks are searched, or keep their random initial values."""
    mask_init: MaskInit = "different"
    """Whether all clients start from the same mask or from different ones."""
    layer_density: LayerDensity = "erk"
    """Distribution of the density over layers."""
    growth: Growth = "gradient"
    """Criterion for growing weights."""
    exchange: float = 0.5
    """Fraction of a layer's kept weights that the first search exchanges, in [0, 1]; it falls by a cosine to 0 in the
    round after the last."""
    mask_pool: MaskPool = "weights"
    """Masked tensors: those of two or more dimensions, or every parameter (the code)."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(self.neighbours >= 1, "algorithm.neighbours", self.neighbours, "a whole number >= 1")
        valid = self.density == "capacity" if isinstance(self.density, str) else 0 < self.density <= 1
        require(valid, "algorithm.density", self.density, "a number in (0, 1], or 'capacity'")
        require(0 <= self.exchange <= 1, "algorithm.exchange", self.exchange, "a number in [0, 1]")
        different = self.mask_init == "different" or self.density != "capacity"
        require(different, "algorithm.mask_init", self.mask_init, "'different', since `density` is 'capacity'")

    @property
    def needs_exact_mean(self) -> str:
        """That no weights are merged."""
        return "has no weights that the server merges"

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client" if self.density == "capacity" else None

    @property
    def plans_by_capacity(self) -> bool:  # type: ignore[override]
        """Whether a client's first mask, whose density stays, follows from its capacity."""
        return self.density == "capacity"

    @property
    def follows_length(self) -> bool:  # type: ignore[override]
        """Whether masks are searched at a rate that decays over the rounds of the run."""
        return self.search == "dst" and self.exchange > 0

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Draw the common mask, whose names and shapes those of all clients have."""
        shapes = masked_shapes(weights, fleet, self.mask_pool)
        counts = layer_counts(shapes, 1.0 if self.density == "capacity" else self.density, self.layer_density)
        masks = fleet.random_masks(shapes, counts, "DisPFL mask")
        return ServerState(round=0, weights=weights, extra={"first_masks": masks})

    def neighbours_of(self, view: ClientView, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients whose models this one receives in the round."""
        place, own = bisect_left(clients, view.id), int(within(clients, view.id))
        others = range(len(clients) - own)  # places, without the client's own
        if self.topology == "ring":
            places = {(place - 1) % len(others), place % len(others)} if others else set()
        elif self.topology == "random":
            below = numbers_below(generator(view.seed, view.id, view.round, "DisPFL neighbours"))
            places = set(drawn(others, self.neighbours, below))
        else:
            places = set(others)
        return [clients[other + (own if other >= place else 0)] for other in sorted(places)]

    def masks(self, server: ServerState, view: ClientView) -> Masks:
        """Return the mask that a client found last, or its first one.

        Args:
            server: State of the server.
            view: View of the client.
        """

        def by_capacity(first: Masks) -> dict[str, int]:
            return layer_counts({n: mask.shape for n, mask in first.items()}, view.capacity, self.layer_density)

        counts = by_capacity if self.density == "capacity" else kept_by
        return own_masks(server.extra["first_masks"], view, self.mask_init, "DisPFL mask", counts)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the neighbours' models, and m_k * w_0 to a client that has no model of its own."""
        masks, extra = self.masks(server, view), dict[str, Weights]()
        for number, neighbour in sorted(view.neighbours.items()) if server.round > 0 else ():
            record, first = neighbour.shared, self.masks(server, neighbour)
            trained = record.get("trained", first)
            values = record["values"] if record else kept_values(server.weights, trained)
            extra |= {f"{number}/values": values, f"{number}/masks": trained}
        weights = {} if view.shared else apply(server.weights, masks)
        return Message(weights=weights, masks=masks, extra=extra)

    def train(self, message: Message, client: Client) -> Update:
        """Train the mean of the neighbours' models under the mask, then search for the next one."""
        held = message.masks
        result = client.fit(self._mixed(message, client), held, callbacks=self.callbacks(message, client))
        values, masks = kept_values(result.weights, held), held
        if self.search == "dst":
            masks = searched(result.weights, held, self._rate(client), self.growth, client)
        trained = {} if masks is held else {"trained": dict(held)}
        return Update(
            weights={},
            weight=client.num_examples,
            shared={"values": values, "masks": dict(masks), **trained},
            memory={"values": values, "masks": dict(held)},
            metrics=result.metrics,
        )

    def _rate(self, place: Client | ClientView) -> float:
        """Return the fraction of weights to exchange in a round, 0 in the round after the last."""
        return cosine(self.exchange, place.round, place.max_rounds + 1)

    def _mixed(self, message: Message, client: Client) -> Weights:
        """Return the mean of the client's own model and those of its neighbours, under its mask."""
        own = _model(client.memory) if client.memory else (message.weights, message.masks)
        return apply(held_mean(own, _received(message)), message.masks)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's own model, which is in its memory."""
        return _model(update.memory or {})[0]

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the mean with the neighbours' models, under the client's mask."""
        return self._mixed(message, client)

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs of FedSpa, with 4 bytes for each weight that a client or a neighbour keeps, for every edge."""
        by_gradient = self.search == "dst" and self.growth == "gradient" and self._rate(facts.view) > 0
        neighbours = facts.view.neighbours
        initial = {name: w.numel() for name, w in facts.model.initial.items() if name not in facts.buffers}
        kept = sum({**initial, **kept_by(facts.message.masks)}.values())
        received = sum(_kept(facts.message, number, facts.buffers, kept) for number in neighbours)
        return replace(
            with_search(super().costs(facts), facts, by_gradient),
            bytes_down_paper=BYTES_PER_WEIGHT * received,
            bytes_up_paper=BYTES_PER_WEIGHT * kept * len(neighbours),
        )


def _model(record: Shared) -> tuple[Weights, Masks]:
    """Return the weights and masks of a model as a client or the server keeps it."""
    masks: Masks = record.get("trained", record["masks"])
    return with_zeros(record["values"], masks), masks


def _received(message: Message) -> Iterator[tuple[Weights, Masks]]:
    """Yield the weights and masks of each model in a message."""
    for key, values in message.extra.items():
        number, part = key.split("/")
        if part == "values":
            masks = message.extra[f"{number}/masks"]
            yield with_zeros(values, masks), masks


def _kept(message: Message, number: int, buffers: frozenset[str], missing: int) -> int:
    """Return the number of weights of a neighbour's model; `missing` in round 0, where it is not sent."""
    values = message.extra.get(f"{number}/values")
    return missing if values is None else sum(each.numel() for n, each in values.items() if n not in buffers)
