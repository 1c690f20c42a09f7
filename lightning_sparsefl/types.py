"""What flows between server, client and engine: frozen values, plain trees of tensors.

A *tree* maps a tensor's name in the module's ``state_dict`` to a tensor. **Weights** hold every parameter and
every floating-point buffer; **masks** hold booleans, True = kept, and a name that is missing is dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Weights: TypeAlias = Mapping[str, Tensor]
"""Named float tensors."""
Masks: TypeAlias = Mapping[str, Tensor]
"""Named bool tensors, True = kept; a missing name is dense."""
Shared: TypeAlias = Mapping[str, Any]
"""What the server keeps about a client: numbers, strings, tensors, or trees of tensors."""


@dataclass(frozen=True)
class ServerState:
    """All that the server knows, besides what it keeps per client."""

    round: int
    """Rounds finished."""
    weights: Weights
    """The global weights."""
    masks: Masks = field(default_factory=dict)
    """The global masks; empty = dense."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Further named trees, such as control variates."""


@dataclass(frozen=True)
class Message:
    """What the server sends to one client. All of it is encoded, so all of it is charged."""

    weights: Weights
    """The weights to start from; a name that is missing is not sent."""
    masks: Masks = field(default_factory=dict)
    """What the client holds: False weights are zero and stay zero."""
    trainable: Masks = field(default_factory=dict)
    """What the client may change: False weights keep their value."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Further named trees."""


@dataclass(frozen=True)
class Update:
    """What one client sends back. All of it but `memory` is encoded, so charged."""

    weights: Weights
    """The result; a name that is missing is not sent and does not vote."""
    kind: Literal["weights", "difference"] = "weights"
    """Whether `weights` are values, or differences from what was received."""
    weight: int = 1
    """Positive integer weight in the merge: samples, or 1 for a plain mean."""
    votes: Masks | None = None
    """Coordinates that count in the merge; None = those trainable and held, ``{}`` = all."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Further named trees, merged by weight."""
    shared: Shared | None = None
    """What the server keeps about this client from now on; None = as before. A tree of masks under the key ``masks``
    is what the client holds next: it is coded against the message's masks, and pictures and `mask/changed` show it."""
    memory: Shared | None = None
    """What the client keeps for itself; None = as before. Never sent."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars of the local fit."""


@dataclass(frozen=True)
class Merged:
    """A round's updates after the reduction."""

    weights: Weights
    """The mean; zero where nobody voted."""
    covered: Masks
    """Where at least one client voted; a missing name was covered everywhere."""
    kind: Literal["weights", "difference"] = "weights"
    """Whether `weights` are values or differences."""
    extra: Mapping[str, Weights] = field(default_factory=dict)
    """Weighted means of the updates' extra trees."""
    reports: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Each client's metrics, by client number."""


@dataclass(frozen=True)
class ClientView:
    """What a server may know of a client: facts, and what the client uploaded; never its data or memory."""

    id: int
    """Number of the client, from 0."""
    num_examples: int
    """Training samples."""
    capacity: float
    """Share of the full model it can train, in (0, 1]."""
    round: int
    """The current round, from 0."""
    max_rounds: int
    """Rounds of the whole run."""
    seed: int
    """The run's seed; :func:`lightning_sparsefl.seeds.generator` derives from it."""
    monitor: str = "train_acc"
    """The metric of local training that methods steer by (`federation.monitor`)."""
    shared: Shared = field(default_factory=dict)
    """What the server keeps about the client."""


@dataclass(frozen=True)
class FitResult:
    """What a local fit yields."""

    weights: Weights
    """The trained weights."""
    metrics: Mapping[str, float]
    """The last logged value of every key."""
    steps: int
    """Optimizer steps taken."""
    callbacks: Sequence[Any] = ()
    """The callback objects after the fit, for example to read a learned mask."""


@dataclass(frozen=True)
class LayerFlops:
    """Work of one layer on one sample."""

    weight: str
    """Name of the weight tensor whose density scales the work."""
    macs: int
    """Multiply-accumulates of the dense forward pass."""
    bias: int
    """Bias additions of the forward pass."""


@dataclass(frozen=True)
class CostFacts:
    """What the cost of one client-round depends on; known without training."""

    view: ClientView
    """The client."""
    message: Message
    """What it received."""
    layers: Sequence[LayerFlops]
    """The module's layers, in the order of the forward pass."""
    epochs: int
    """Local epochs."""
    samples: int
    """Training samples of one epoch."""
    batch_size: int
    """Samples of one batch."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's floating-point buffers, which travel but which papers do not count."""
    model: Any = None
    """Knows the model's groups of units, as `units`."""
    again: bool = False
    """In a rehearsal, where the view cannot tell: whether the client took part before."""


@dataclass(frozen=True)
class Costs:
    """One client-round; FLOPs are operations, bytes are bytes."""

    flops_paper: float
    """By the paper's own formula."""
    flops_analytic: float
    """What the hardware must do."""
    bytes_down_paper: float
    """Server to client, by the paper's formula."""
    bytes_up_paper: float
    """Client to server, by the paper's formula."""


@runtime_checkable
class TrainerLike(Protocol):
    """The part of ``lightning.pytorch.Trainer`` that this package's callbacks may rely on.

    A real ``Trainer`` has it, and so has the federated client loop.
    """

    current_epoch: int
    global_step: int
    max_epochs: int | None
    should_stop: bool

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        """The last logged value of every key."""
        ...

    @property
    def optimizers(self) -> Sequence[Any]:
        """Those that `configure_optimizers` made."""
        ...

    @property
    def lr_scheduler_configs(self) -> Sequence[Any]:
        """Schedulers, with when they step."""
        ...

    @property
    def loggers(self) -> Sequence[Any]:
        """Where metrics go."""
        ...

    @property
    def callbacks(self) -> Sequence[Any]:
        """All callbacks of the fit."""
        ...

    @property
    def lightning_module(self) -> Any:
        """The module in training."""
        ...

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch."""
        ...

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the fit."""
        ...
