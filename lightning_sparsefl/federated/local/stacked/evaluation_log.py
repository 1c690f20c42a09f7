"""What `self.log` records for several clients in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchmetrics import Metric

from lightning_sparsefl.federated.local.stacked.logs import StackedLog
from lightning_sparsefl.federated.local.stacked.metric_states import MetricStates


@dataclass
class EvaluationLog(StackedLog):
    """Receiver of `self.log` in a validation or test step for several clients, which also takes metric objects."""

    _objects: dict[str, tuple[Metric, list[bool]]] = field(default_factory=dict)
    """Metric objects by key, and whether each client has logged them."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Record a value of each client; the arguments are those of :meth:`lightning.pytorch.LightningModule.log`."""
        on_epoch = True if on_epoch is None else on_epoch
        if not on_epoch:
            return  # an evaluation returns values of epochs only
        if isinstance(value, Metric):
            for key in (name, f"{name}_epoch") if on_step else (name,):
                _, logged = self._objects.setdefault(key, (value, [False] * self.size))
                logged[self.low : self.high] = [True] * (self.high - self.low)
            return
        super().log(name, value, prog_bar, logger, bool(on_step), on_epoch, *args, **options)

    def results(self, states: MetricStates) -> list[dict[str, float]]:
        """Return the value of each key for each client, as an evaluation returns them.

        Args:
            states: States of the metric objects.
        """
        found = self.metrics()
        for name, entry in self._entries.items():
            if entry.on_step:
                for metrics in found:
                    metrics.pop(f"{name}_step", None)
        for name, (metric, logged) in self._objects.items():
            for metrics, value, has in zip(found, states.compute(metric), logged, strict=True):
                if has:
                    metrics[name] = value
        return found
