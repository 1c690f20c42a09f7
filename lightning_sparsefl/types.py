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
    """The state of the server, except for its records about clients."""

    round: int
    """Number of finished rounds."""
    weights: Weights
    """The global weights."""
    masks: Masks = field(default_factory=dict)
    """The global masks; empty = dense."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Additional named trees, such as control variates."""


@dataclass(frozen=True)
class PendingUpdate:
    """An update that was not finished when the server closed its round, and that a later round merges."""

    client: int
    """Number of the client."""
    round: int
    """Index of the round that the client was drawn in."""
    arrival: float
    """Simulated time at which the update arrives, in seconds since the start of the run."""
    weight: int
    """Weight of the update in a mean."""
    num_examples: int
    """Number of training samples of the client, the weight of buffers."""
    changes: Weights
    """Differences from the received weights."""
    votes: Masks = field(default_factory=dict)
    """Masks of the coordinates that the client votes on; all coordinates of a missing name."""


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds, which is stored in checkpoints."""

    server: ServerState
    """The state of the server."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """The state of the client sampler, as plain values."""
    pending: Sequence[PendingUpdate] = ()
    """Updates that had not arrived when their round was closed, which later rounds merge."""
    run: str = ""
    """Random identifier of the run, which a resumed run keeps; 32 hexadecimal digits."""
    seconds: float = 0.0
    """Simulated time since the start of the run, in seconds; 0 if time is not simulated."""


@dataclass(frozen=True)
class Message:
    """A message from the server to one client; all of its fields are encoded and counted as downlink."""

    weights: Weights
    """The weights to start from; a name that is missing is not sent."""
    masks: Masks = field(default_factory=dict)
    """Masks of the client's model: weights with False are zero and stay zero."""
    trainable: Masks = field(default_factory=dict)
    """Masks of trainable weights: weights with False keep their values."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Additional named trees."""


@dataclass(frozen=True)
class Update:
    """The answer of one client; all of its fields except `memory` are encoded and counted as uplink."""

    weights: Weights
    """The resulting weights; a name that is missing is not sent and has no votes."""
    kind: Literal["weights", "difference"] = "weights"
    """Whether `weights` are values, or differences from the received weights."""
    weight: int = 1
    """Weight of the update, a positive integer: the number of samples, or 1 for a plain mean."""
    votes: Masks | None = None
    """Coordinates that count in the merge; None = those kept and trainable, ``{}`` = all."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Additional named trees of floats or bools, averaged by `weight` over all updates; a bool takes one bit, and its
    mean is the weighted frequency of True."""
    shared: Shared | None = None
    """New record of the server about this client; None = unchanged. Its key ``masks`` is a tree of the client's next
    masks: they are encoded relative to those of the message, and shown in pictures and `mask/changed`."""
    memory: Shared | None = None
    """New memory of the client; None = unchanged. It is never sent."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars of the local fit."""


@dataclass(frozen=True)
class Merged:
    """The merged updates of a round."""

    weights: Weights
    """The mean; zero for coordinates without votes."""
    covered: Masks
    """Masks of the coordinates with at least one vote; all coordinates of a missing name."""
    kind: Literal["weights", "difference"] = "weights"
    """Whether `weights` are values or differences."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Weighted means of the updates' extra trees."""
    reports: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the clients, by client number; with `simulated_seconds`, also that time, as ``seconds``."""
    voters: Mapping[str, Tensor] = field(default_factory=dict)
    """Number of clients that voted on each coordinate, int32; a missing name has the votes of all merged clients."""


@dataclass(frozen=True)
class ClientView:
    """The server's view of a client: its properties and uploaded values, but never its data or memory."""

    id: int
    """Number of the client, from 0."""
    num_examples: int
    """Number of training samples."""
    capacity: float
    """Fraction of the full model that the client can train, in (0, 1]."""
    round: int
    """Index of the current round, from 0."""
    max_rounds: int
    """Number of rounds of the run."""
    seed: int
    """Random seed of the run, to derive generators with :func:`lightning_sparsefl.seeds.generator`."""
    monitor: str = "train_acc"
    """Metric of local training that methods use (`federation.monitor`)."""
    shared: Shared = field(default_factory=dict)
    """Record of the server about the client."""
    local_epochs: int | None = None
    """Number of the client's local epochs in the round (`federation.local_epochs`); None = `trainer.max_epochs`."""


@dataclass(frozen=True)
class FitResult:
    """The result of a local fit."""

    weights: Weights
    """The trained weights."""
    metrics: Mapping[str, float]
    """The last logged value of every key."""
    steps: int
    """Number of optimizer steps taken."""
    callbacks: Sequence[Any] = ()
    """The callback objects after the fit, for example to read a learned mask."""


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer for one sample."""

    weight: str
    """Name of the weight tensor whose density scales the operations."""
    macs: int
    """Number of multiply-accumulate operations of the dense forward pass."""
    bias: int
    """Number of bias additions of the forward pass."""


@dataclass(frozen=True)
class CostFacts:
    """The facts that determine the costs of one client-round, known without training."""

    view: ClientView
    """View of the client."""
    message: Message
    """Message that the client receives."""
    layers: Sequence[LayerFlops]
    """Layers of the module in the order of the forward pass."""
    epochs: int
    """Number of the client's local epochs."""
    samples: int
    """Number of training samples of one epoch."""
    batch_size: int
    """Number of samples of one batch."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's floating-point buffers, which are sent but not counted in papers."""
    model: Any = None
    """Object whose attributes `initial` and `units` have the initial weights of the model and its groups of units."""
    again: bool = False
    """Whether the client participated before, if the view does not show it, as in `profile`."""


@dataclass(frozen=True)
class Costs:
    """The costs of one client-round."""

    flops_paper: float
    """Floating-point operations by the formula of the paper."""
    flops_analytic: float
    """Floating-point operations that the hardware must execute."""
    bytes_down_paper: float
    """Bytes from the server to the client by the formula of the paper."""
    bytes_up_paper: float
    """Bytes from the client to the server by the formula of the paper."""
