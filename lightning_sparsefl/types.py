"""Frozen dataclasses exchanged between server, clients and engine, with trees of tensors.

A *tree* maps a tensor's name in the module's ``state_dict`` to a tensor. **Weights** contain every parameter and every
floating-point buffer; **masks** contain booleans, True = kept, and a name that is missing is dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

Weights: TypeAlias = Mapping[str, Tensor]
"""Named float tensors."""
Masks: TypeAlias = Mapping[str, Tensor]
"""Named bool tensors, True = kept; a missing name is dense."""
Shared: TypeAlias = Mapping[str, Any]
"""Record that the server stores about a client: numbers, strings, tensors, or trees of tensors."""


@dataclass(frozen=True)
class ServerState:
    """The state of the server, except for its records about clients.

    Attributes:
        round: Number of finished rounds.
        weights: The global weights.
        masks: The global masks; empty = dense. Weights with False are set to zero.
        extra: Additional named trees, such as control variates.
    """

    round: int
    weights: Weights
    masks: Masks = field(default_factory=dict)
    extra: Mapping[str, Weights] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingUpdate:
    """An update that was not finished when the server closed its round, and that a later round merges.

    Attributes:
        client: Number of the client.
        round: Index of the round that the client was drawn in.
        arrival: Simulated time at which the update arrives, in seconds since the start of the run.
        weight: Weight of the update in a mean.
        num_examples: Number of training samples of the client, the weight of buffers.
        changes: Differences from the received weights.
        votes: Masks of the coordinates that the client votes on; all coordinates of a missing name.
    """

    client: int
    round: int
    arrival: float
    weight: int
    num_examples: int
    changes: Weights
    votes: Masks = field(default_factory=dict)

    def has_arrived(self, at: float) -> bool:
        """Return whether the update is there at a simulated time, in seconds since the start of the run.

        Example:
            >>> update = PendingUpdate(client=0, round=1, arrival=2.5, weight=1, num_examples=1, changes={})
            >>> update.has_arrived(2.4), update.has_arrived(2.5)
            (False, True)
        """
        return self.arrival <= at


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds, which is stored in checkpoints.

    Attributes:
        server: The state of the server.
        sampler: The state of the client sampler, as plain values.
        pending: Updates that had not arrived when their round was closed, which later rounds merge.
        run: Random identifier of the run, which a resumed run keeps; 32 hexadecimal digits.
        seconds: Simulated time since the start of the run, in seconds; 0 if time is not simulated.
    """

    server: ServerState
    sampler: Mapping[str, Any] = field(default_factory=dict)
    pending: Sequence[PendingUpdate] = ()
    run: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Message:
    """A message from the server to one client; all of its fields are encoded and counted as downlink.

    Attributes:
        weights: The weights to start from; a name that is missing is not sent.
        masks: Masks of the client's model: weights with False are set to zero and stay zero.
        trainable: Masks of trainable weights: weights with False keep their values.
        extra: Additional named trees.
    """

    weights: Weights
    masks: Masks = field(default_factory=dict)
    trainable: Masks = field(default_factory=dict)
    extra: Mapping[str, Weights] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """The answer of one client; all of its fields except `memory` are encoded and counted as uplink.

    `extra` and `shared` may take at most 4 times the size of the model plus 64 KiB each.

    Attributes:
        weights: The resulting weights; a name that is missing is not sent and has no votes.
        kind: Whether `weights` are values, or differences from the received weights.
        weight: Weight of the update, a positive integer: the number of samples, or 1 for a plain mean.
        votes: Coordinates that count in the merge; None = those kept and trainable, ``{}`` = all.
        extra: Additional named trees of floats or bools, averaged by `weight` over all updates, of which those without
            a tensor count as zero; a bool takes one bit, and its mean is the weighted frequency of True. A tensor has
            the same shape from all clients.
        shared: New record of the server about this client; None = unchanged. Its key ``masks`` is a tree of the
            client's next masks: they are encoded relative to those of the message, and shown in pictures and
            `mask/changed`.
        memory: New memory of the client; None = unchanged. It is never sent. In `shared` and `memory`, keys are
            strings, and tuples come back as lists.
        metrics: Scalars of the local fit.
    """

    weights: Weights
    kind: Literal["weights", "difference"] = "weights"
    weight: int = 1
    votes: Masks | None = None
    extra: Mapping[str, Weights] = field(default_factory=dict)
    shared: Shared | None = None
    memory: Shared | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Merged:
    """The merged updates of a round.

    Attributes:
        weights: The mean; zero for coordinates without votes.
        covered: Masks of the coordinates with at least one vote; all coordinates of a missing name.
        kind: Whether `weights` are values or differences.
        extra: Weighted means of the updates' extra trees.
        reports: Metrics of the clients, by client number; with `simulated_seconds`, also that time, as ``seconds``.
        voters: Number of clients that voted on each coordinate, int32; a missing name has the votes of all merged
            clients.
        late: Number of late updates among the merged ones, whose clients report nothing.
    """

    weights: Weights
    covered: Masks
    kind: Literal["weights", "difference"] = "weights"
    extra: Mapping[str, Weights] = field(default_factory=dict)
    reports: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    voters: Mapping[str, Tensor] = field(default_factory=dict)
    late: int = 0

    @property
    def clients(self) -> int:
        """Number of merged updates."""
        return len(self.reports) + self.late


@dataclass(frozen=True)
class ClientView:
    """The server's view of a client: its properties and uploaded values, but never its data or memory.

    Attributes:
        id: Number of the client, from 0.
        num_examples: Number of training samples.
        capacity: Fraction of the full model that the client can train, in (0, 1].
        round: Index of the current round, from 0.
        max_rounds: Number of rounds of the run.
        seed: Random seed of the run, to derive generators with :func:`lightning_sparsefl.seeds.generator`.
        monitor: Metric of local training that methods use (`federation.monitor`).
        shared: Record of the server about the client.
        local_epochs: Number of the client's local epochs in the round (`federation.local_epochs`); None =
            `trainer.max_epochs`.
        neighbours: Views of the clients that :meth:`FederatedAlgorithm.neighbours_of` names, by number; only for
            messages and costs.
    """

    id: int
    num_examples: int
    capacity: float
    round: int
    max_rounds: int
    seed: int
    monitor: str = "train_acc"
    shared: Shared = field(default_factory=dict)
    local_epochs: int | None = None
    neighbours: Mapping[int, ClientView] = field(default_factory=dict)


@dataclass(frozen=True)
class FitResult:
    """The result of a local fit.

    Attributes:
        weights: The trained weights.
        metrics: The last logged value of every key. In a profile, which trains nothing, each key is 1.
        steps: Number of optimizer steps taken.
        callbacks: The callbacks that were passed to the fit, after it, for example to read a learned mask.
    """

    weights: Weights
    metrics: Mapping[str, float]
    steps: int
    callbacks: Sequence[Any] = ()


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer for one sample.

    Attributes:
        weight: Name of the weight tensor whose density scales the operations.
        macs: Number of multiply-accumulate operations of the dense forward pass.
        bias: Number of bias additions of the forward pass.
    """

    weight: str
    macs: int
    bias: int


@dataclass(frozen=True)
class CostFacts:
    """The facts that determine the costs of one client-round, known without training.

    Attributes:
        view: View of the client.
        message: Message that the client receives.
        layers: Layers of the module in the order of the forward pass.
        epochs: Number of the client's local epochs.
        samples: Number of training samples of one epoch.
        batch_size: Number of samples of one batch.
        buffers: Names of the model's floating-point buffers, which are sent but not counted in papers.
        model: Object whose attributes `initial`, `uses` and `units` have the initial weights of the model, the uses
            of its parameters by layers, and its groups of units.
        again: Whether the client participated before, if the view does not show it, as in `profile`.
    """

    view: ClientView
    message: Message
    layers: Sequence[LayerFlops]
    epochs: int
    samples: int
    batch_size: int
    buffers: frozenset[str] = frozenset()
    model: Any = None
    again: bool = False


@dataclass(frozen=True)
class Costs:
    """The costs of one client-round.

    Attributes:
        flops_paper: Floating-point operations by the formula of the paper.
        flops_analytic: Floating-point operations that the hardware must execute.
        bytes_down_paper: Bytes from the server to the client by the formula of the paper.
        bytes_up_paper: Bytes from the client to the server by the formula of the paper.
    """

    flops_paper: float
    flops_analytic: float
    bytes_down_paper: float
    bytes_up_paper: float
