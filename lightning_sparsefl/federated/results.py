"""What `self.log` fills: Lightning's own collection, without what it repeats at every call.

Lightning moves a logged value's whole metric to the value's device at each call, by a recursive copy of all its
attributes, which takes longer than the training step of a small network. Here the first call of a key takes
Lightning's own path; a later call with the same arguments only updates the value.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor


class FastResults(_ResultCollection):
    """Lightning's collection of logged values, quick from the second call of a key on.

    Args:
        training: Whether it is filled by training rather than by evaluation.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.any_on_step = False
        self._known: dict[str, tuple[_ResultMetric, tuple[Any, ...]]] = {}

    @torch.compiler.disable
    def log(  # type: ignore[override]
        self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any
    ) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        key = f"{fx}.{name}"
        arguments = tuple(options.values())
        metric, known = self._known.get(key, (None, None))
        if metric is None or known != arguments or not _same_kind(metric, value):
            super().log(fx, name, value, batch_size=batch_size, **options)
            self._known[key] = (self[key], arguments)
            self.any_on_step |= options["on_step"]
            return
        metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False

    @staticmethod
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        """Compute first: Lightning's advice to set `sync_dist` is wrong where the other ranks have other clients."""
        if not on_step and result_metric.meta.on_epoch and result_metric._computed is None:
            result_metric.compute()
        return _ResultCollection._get_cache(result_metric, on_step)


def _same_kind(metric: _ResultMetric, value: Any) -> bool:
    if isinstance(value, Tensor):
        return metric.is_tensor and bool(metric.value.device == value.device)
    return not metric.is_tensor


class LogConnector(_LoggerConnector):
    """Lightning's connector between `self.log` and the loggers, for a trainer whose loops are not Lightning's."""

    @property
    def should_update_logs(self) -> bool:
        """Whether this step's values go to the loggers."""
        trainer: Any = self.trainer
        if trainer.log_every_n_steps == 0:
            return False
        step = trainer.log_step
        return step is None or step % trainer.log_every_n_steps == 0 or trainer.should_stop

    def on_batch_end(self) -> None:
        """Publish what is logged per step; values of the whole epoch need nothing here."""
        results: Any = self.trainer._results
        if results.any_on_step:
            super().on_batch_end()
        else:
            results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        """Send this step's values to the loggers."""
        if self.trainer.loggers:
            super().update_train_step_metrics()

    def update_eval_step_metrics(self, step: int) -> None:
        """Send this step's values to the loggers."""
        if self.trainer.loggers:
            super().update_eval_step_metrics(step)
