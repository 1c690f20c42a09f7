"""What the cost of local training depends on, besides the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl.types import ClientView, CostFacts, LayerFlops, Message


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

    def samples(self, num_examples: int) -> int:
        """Return the number of samples of one local epoch.

        Args:
            num_examples: Number of the client's training samples.
        """
        return min(num_examples, self._batches(num_examples) * self.batch_size)

    def facts(self, view: ClientView, message: Message) -> CostFacts:
        """Return the facts that the cost of one client-round depends on.

        Args:
            view: Facts of the client.
            message: Message that the client receives.
        """
        return CostFacts(
            view=view,
            message=message,
            layers=self.layers or (),
            epochs=self._epochs(view),
            samples=self.samples(view.num_examples),
            batch_size=self.batch_size,
            buffers=self.buffers,
            model=self.model,
        )

    def batches(self, view: ClientView) -> int:
        """Return the number of batches of a client's local training, over all local epochs.

        Args:
            view: Facts of the client.
        """
        return self._epochs(view) * self._batches(view.num_examples)

    def _epochs(self, view: ClientView) -> int:
        return self.epochs if view.local_epochs is None else view.local_epochs

    def _batches(self, num_examples: int) -> int:
        """Return the number of batches of one epoch."""
        full, rest = divmod(num_examples, self.batch_size)
        batches = full + (rest > 0 and not self.drop_last)
        limit = self.max_batches if isinstance(self.max_batches, int) else int(batches * self.max_batches)
        return min(limit, batches)
