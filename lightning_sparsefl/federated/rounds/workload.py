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
    batch_size: int
    max_batches: int | float = 1.0
    """As `limit_train_batches`: a number of batches, or a fraction of them."""
    drop_last: bool = False
    """Whether loaders leave out a last, smaller batch."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's floating-point buffers."""
    model: Any = None
    """Knows the model's groups of units."""

    def facts(self, view: ClientView, message: Message) -> CostFacts:
        """Return the facts that the cost of one client-round depends on.

        Args:
            view: Facts of the client.
            message: Message that the client receives.
        """
        full, rest = divmod(view.num_examples, self.batch_size)
        batches = full + (rest > 0 and not self.drop_last)
        limit = self.max_batches if isinstance(self.max_batches, int) else int(batches * self.max_batches)
        samples = min(view.num_examples, min(limit, batches) * self.batch_size)
        return CostFacts(
            view=view,
            message=message,
            layers=self.layers or (),
            epochs=self.epochs,
            samples=samples,
            batch_size=self.batch_size,
            buffers=self.buffers,
            model=self.model,
        )
