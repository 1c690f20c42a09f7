"""What the cost of local training depends on, besides the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_sparsefl.types import ClientView, CostFacts, LayerFlops, Message


class Batching(NamedTuple):
    """How a loader cuts a client's samples into batches."""

    size: int
    drop_last: bool
    """Whether it leaves out a last, smaller batch."""


@dataclass(frozen=True)
class Workload:
    """What the cost of local training depends on, besides the client."""

    layers: Sequence[LayerFlops] | None
    """FLOPs of the model's layers; None if they are not counted."""
    epochs: int
    """Number of local epochs of clients without a number of their own."""
    batch_size: int
    max_batches: int | float = 1.0
    """As `limit_train_batches`: a number of batches, or a fraction of them."""
    drop_last: bool = False
    """Whether loaders leave out a last, smaller batch."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's floating-point buffers."""
    model: Any = None
    """Knows the model's groups of units."""
    own: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    """Batch size and `drop_last` of clients with others, by number."""

    def batching(self, client: int) -> Batching:
        """Return how a client's samples are cut into batches.

        Args:
            client: Number of the client.
        """
        return Batching(*self.own.get(client, (self.batch_size, self.drop_last)))

    def samples(self, client: int, num_examples: int) -> int:
        """Return the number of samples of one local epoch.

        Args:
            client: Number of the client.
            num_examples: Number of the client's training samples.
        """
        return self._samples(num_examples, self.batching(client))

    def facts(self, view: ClientView, message: Message, batching: Batching | None = None) -> CostFacts:
        """Return the facts that the cost of one client-round depends on.

        Args:
            view: Facts of the client.
            message: Message that the client receives.
            batching: Batches of another client that it stands for; None = its own.
        """
        batching = batching or self.batching(view.id)
        return CostFacts(
            view=view,
            message=message,
            layers=self.layers or (),
            epochs=self._epochs(view),
            samples=self._samples(view.num_examples, batching),
            batch_size=batching.size,
            buffers=self.buffers,
            model=self.model,
        )

    def batches(self, view: ClientView) -> int:
        """Return the number of batches of a client's local training, over all local epochs.

        Args:
            view: Facts of the client.
        """
        return self._epochs(view) * self._batches(view.num_examples, self.batching(view.id))

    def round_samples(self, view: ClientView) -> int:
        """Return the number of samples of a client's local training, each counted once in every local epoch.

        Args:
            view: Facts of the client.
        """
        return self._epochs(view) * self.samples(view.id, view.num_examples)

    def _epochs(self, view: ClientView) -> int:
        return self.epochs if view.local_epochs is None else view.local_epochs

    def _samples(self, num_examples: int, batching: Batching) -> int:
        return min(num_examples, self._batches(num_examples, batching) * batching.size)

    def _batches(self, num_examples: int, batching: Batching) -> int:
        """Return the number of batches of one epoch."""
        full, rest = divmod(num_examples, batching.size)
        batches = full + (rest > 0 and not batching.drop_last)
        limit = self.max_batches if isinstance(self.max_batches, int) else int(batches * self.max_batches)
        return min(limit, batches)
