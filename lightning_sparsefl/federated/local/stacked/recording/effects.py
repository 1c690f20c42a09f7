"""What a recorded step does besides its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparsefl.federated.local.stacked.logs import Logged, LoggedObject, StackedLog
from lightning_sparsefl.federated.local.stacked.metrics.states import CountChange, MetricRows
from lightning_sparsefl.federated.local.stacked.recording.operations import Operations


@dataclass(frozen=True)
class Effects:
    """Calls of `self.log`, and updates of metric objects, in a step."""

    logged: Sequence[Logged]
    """Calls with a value."""
    objects: Sequence[LoggedObject]
    """Calls with a metric object."""
    changes: Sequence[CountChange]
    """What happens to the number of updates of each metric object."""

    def repeat(self, values: Sequence[Tensor], log: StackedLog, metrics: MetricRows) -> None:
        """Do the same in another step.

        Args:
            values: Values of the calls with a value.
            log: Receiver of what the step logs.
            metrics: States of the metric objects.
        """
        log.pending += [each._replace(value=value) for each, value in zip(self.logged, values, strict=True)]
        log.pending_objects += self.objects
        metrics.count(self.changes)


def with_effects(
    record: Callable[[], Operations | None], log: StackedLog, metrics: MetricRows
) -> tuple[Operations, Effects] | None:
    """Return the operations of a step with its effects; None if it cannot be repeated.

    Args:
        record: Function that does the step and returns its operations, or None.
        log: Receiver of what the step logs.
        metrics: States of the metric objects.
    """
    read = metrics.read_updates
    operations = record()
    if operations is None or metrics.calls_singly or metrics.read_updates != read:  # or depends on further numbers
        return None
    return operations, Effects(list(log.pending), list(log.pending_objects), metrics.changes)
