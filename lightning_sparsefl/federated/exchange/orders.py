"""Orders from the server to a node, and the node's answers.

An order holds all that a client's half of a method may see besides its data and its own memory. Both are plain
headers around a :class:`~lightning_sparsefl.types.Message` and an :class:`~lightning_sparsefl.types.Update`, and
:mod:`~lightning_sparsefl.federated.exchange.encoding` turns them into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Size

Split = Literal["val", "test", "train"]
"""A split of a client's data."""
SCORING_STEPS: Mapping[Split, str] = {"val": "validation_step", "train": "validation_step", "test": "test_step"}
"""Hook of a LightningModule that scores each split."""
Task = Literal["train", "score", "finetune", "survey"]
"""What an order asks for."""


@dataclass(frozen=True)
class ClientFacts:
    """What a client may know of itself and of the run."""

    num_examples: int
    """Number of the client's training samples, as the server knows it."""
    capacity: float
    """Share of the full model that the client can train, in (0, 1]."""
    max_rounds: int
    """Number of rounds of the run."""
    monitor: str = "train_acc"
    """Metric of local training that methods steer by."""
    local_epochs: int | None = None
    """Local epochs of this round; None = `trainer.max_epochs`."""


@dataclass(frozen=True)
class Order:
    """One client's work, as the server asks for it."""

    run: str
    """Identifier of the run."""
    client: int
    """Number of the client, from 0."""
    round: int
    """Number of the round, from 0."""
    task: Task
    """What to do with the message."""
    facts: ClientFacts
    """What the client may know."""
    key: str
    """Key of the client's randomness, constant for the run; the run's seed does not travel."""
    message: Message
    """What the client receives."""
    splits: tuple[Split, ...] = ()
    """Splits to score: the result of `score` and `finetune`, or the trained weights right after `train`."""
    held: str | None = None
    """Digest of the masks that the client holds and the message is encoded against; None = it stands alone."""
    version: int | None = None
    """Version of the node's record to start from; None = the client starts without one."""
    keep: tuple[int, ...] = ()
    """Rounds whose versions of the record may be asked for again."""


@dataclass(frozen=True)
class Answer:
    """What a node returns for one order."""

    run: str
    """Identifier of the run, as in the order."""
    client: int
    """Number of the client, as in the order."""
    round: int
    """Number of the round, as in the order."""
    task: Task
    """Task of the order."""
    num_examples: int
    """Number of training samples that the client has now."""
    update: Update | None = None
    """What the client uploads, without its memory."""
    scores: Mapping[Split, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each split of the order."""
    up: Size | None = None
    """Size of the encoded update."""
    version: int | None = None
    """Version of the record that the node keeps now; None = it keeps none."""
    elapsed: float = 0.0
    """Wall-clock seconds of the work."""
    failure: str | None = None
    """Why the client failed, as a clause."""
    forgot: bool = False
    """Whether the node lacks the version or the masks that the order names, and has done nothing."""
    checked: bool = False
    """Whether this process has validated the update; never encoded, so that a received one is validated again."""
    error: BaseException | None = None
    """The error behind `failure`; never encoded."""
