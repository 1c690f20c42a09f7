"""Results of `self.log`: Lightning's collection of logged values without the work that it repeats in every call.

In each call, Lightning checks the arguments, inspects the signature of `training_step`, rebuilds the metadata of a key
to compare them, and moves the metric of the key to the value's device by a recursive copy of its attributes; for a
small network this takes longer than the training step. Here the checks are made and the metadata are built in the first
call for a key in any fit of a module, a metric is moved only if the device differs, and the mean of an epoch is added
up without the bookkeeping of a metric's update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

_META = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_KEPT = (torch.float32, torch.float64)
"""Types of values that Lightning adds up as they are."""


class Call(NamedTuple):
    """A call of `self.log` that Lightning has checked."""

    options: dict[str, Any]
    """Options of the call, without the batch size."""
    arguments: tuple[Any, ...]
    """All options as Lightning's collection gets them."""
    metric: _ResultMetric
    is_mean: bool
    """Whether the key is the mean over an epoch alone."""


Calls = dict[tuple[str, str], Call]
"""Calls by hook and key."""


class KnownCalls:
    """Checked calls of `self.log`, kept from one fit of a module to the next."""

    def __init__(self) -> None:
        self._module: LightningModule | None = None
        self._calls: Calls = {}

    def of(self, module: LightningModule) -> Calls:
        """Return the calls of a module's earlier fits, to be added to; those of another module are dropped.

        Args:
            module: Module that is about to be trained.
        """
        if module is not self._module:
            self._module, self._calls = module, {}
        return self._calls


class FastResults(_ResultCollection):
    """Lightning's collection of logged values, for one loader.

    Args:
        training: Whether the values come from training instead of evaluation.
        calls: Checked calls of earlier fits, whose metrics are used again. Default: none are known.
    """

    def __init__(self, training: bool, calls: Calls | None = None) -> None:
        super().__init__(training)
        self.any_on_step = False
        self._arguments: dict[str, tuple[Any, ...]] = {}
        self._calls: Calls = {} if calls is None else calls

    def emptied(self) -> FastResults:
        """Return a collection without values, to which the checked calls of this one are known."""
        return FastResults(self.training, self._calls)

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
        """Record a value; :meth:`lightning.pytorch.LightningModule.log` calls this with all its options."""
        options["sync_dist_fn"] = _unchanged  # that of the trainer does as much, but a call outlives its trainer
        key, arguments, tensor = f"{fx}.{name}", tuple(options.values()), isinstance(value, Tensor)
        metric = self.get(key)
        if metric is None:
            metric = self[key] = _ResultMetric(_metadata(fx, name, options), tensor)
            self._arguments[key] = arguments
            self.any_on_step |= options["on_step"]
        elif self._arguments[key] != arguments or metric.is_tensor is not tensor:
            super().log(fx, name, value, batch_size=batch_size, **options)  # raises if they differ
            return
        self._record(metric, value, batch_size)

    def _record(self, metric: _ResultMetric, value: Any, batch_size: int | None) -> None:
        if isinstance(value, Tensor) and metric.value.device != value.device:
            metric.to(value.device)
        metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False

    def repeat(self, fx: str, name: str, value: Tensor, batch_size: int | None, call: dict[str, Any]) -> bool:
        """Record a value if the key was logged before by the same call; return whether it was.

        Args:
            fx: Hook that logs.
            name: Key of the value.
            value: Scalar.
            batch_size: Number of samples that the value is of, or None.
            call: Other options of the call.
        """
        known = self._calls.get((fx, name))
        if known is None or known.options != call or not self._holds(f"{fx}.{name}", known):
            return False
        metric, value = known.metric, value.detach()
        if known.is_mean and value.dtype in _KEPT and value.device == metric.value.device:
            self._add(metric, value, batch_size)
        else:
            self._record(metric, value, batch_size)
        return True

    def _holds(self, key: str, call: Call) -> bool:
        """Return whether a key has the metric of a call, after taking it over from an earlier fit if the key is new."""
        metric = self.get(key)
        if metric is None:
            call.metric.reset()
            metric = self[key] = call.metric
            self._arguments[key] = call.arguments
            self.any_on_step |= metric.meta.on_step
        return metric is call.metric

    def _add(self, metric: _ResultMetric, value: Tensor, batch_size: int | None) -> None:
        """Add a value to the mean of an epoch, as `metric.update` does."""
        size = self._extract_batch_size(metric, batch_size, metric.meta)
        metric._computed, metric._update_count, metric.has_reset = None, metric._update_count + 1, False
        metric.value = metric.value + value * size
        metric.cumulated_batch_size = metric.cumulated_batch_size + size

    def remember(self, fx: str, name: str, call: dict[str, Any]) -> None:
        """Keep the options of a call that Lightning has checked.

        Args:
            fx: Hook that logs.
            name: Key of the value.
            call: Other options of the call.
        """
        key = f"{fx}.{name}"
        meta = self[key].meta
        is_mean = meta.is_mean_reduction and meta.on_epoch and not meta.on_step
        self._calls[fx, name] = Call(call, self._arguments[key], self[key], is_mean)

    @staticmethod
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        """Return the reduced value, computed first to avoid Lightning's warning about `sync_dist`.

        The warning would be wrong: other ranks train other clients, so their values must not be reduced together.
        """
        if not on_step and result_metric.meta.on_epoch and result_metric._computed is None:
            result_metric.compute()
        return _ResultCollection._get_cache(result_metric, on_step)


if not TYPE_CHECKING:
    FastResults.log = torch.compiler.disable(FastResults.log)  # as in Lightning


def log(self: LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
    """Log a value as :meth:`lightning.pytorch.LightningModule.log` does; repeated calls skip its checks.

    Args:
        self: Module of the user.
        name: Key of the value.
        value: Value; the shortcut is for scalar tensors.
        *args: Options by position, which turn the shortcut off.
        **options: Options of Lightning's method.
    """
    trainer: Any = self._trainer
    results, fx = getattr(trainer, "_results", None), self._current_fx_name
    scalar = type(value) is Tensor and value.dim() == 0 and not args
    if not scalar or fx is None or not isinstance(results, FastResults) or torch.compiler.is_compiling():
        LightningModule.log(self, name, value, *args, **options)
        return
    connector = trainer._logger_connector
    if connector.should_reset_tensors(fx):
        results.reset(metrics=False, fx=fx)
    call = {option: given for option, given in options.items() if option != "batch_size"}
    if results.repeat(fx, name, value, options.get("batch_size"), call):
        connector._current_fx = fx
    else:
        LightningModule.log(self, name, value, **options)
        results.remember(fx, name, call)


def discard(self: LightningModule, *args: Any, **options: Any) -> None:
    """Replace `log` in a pass whose logged values are not read; arguments are checked where the client trains."""


def _unchanged(value: Any, *args: Any, **options: Any) -> Any:
    """Return a value as it is, as the reduction over the processes of a single device does."""
    return value


def _metadata(fx: str, name: str, options: dict[str, Any]) -> _Metadata:
    meta = _Metadata(fx=fx, name=name, **{option: options[option] for option in _META})
    meta.sync = _Sync(
        fn=options["sync_dist_fn"],
        _should=options["sync_dist"],
        rank_zero_only=options["rank_zero_only"],
        _group=options["sync_dist_group"],
    )
    return meta


class LogConnector(_LoggerConnector):
    """Lightning's connector between `self.log` and the loggers, for the loops of the fast engine."""

    @property
    def should_update_logs(self) -> bool:
        """Whether to send the values of this step to the loggers."""
        trainer: Any = self.trainer
        if trainer.log_every_n_steps == 0:
            return False
        step = trainer.log_step
        return step is None or step % trainer.log_every_n_steps == 0 or trainer.should_stop

    def on_batch_end(self) -> None:
        """Publish the values logged per step; those logged per epoch need no work here."""
        results: Any = self.trainer._results
        if results.any_on_step:
            super().on_batch_end()
        else:
            results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        """Send the values of a training step to the loggers."""
        if self.trainer.loggers:
            super().update_train_step_metrics()

    def update_eval_step_metrics(self, step: int) -> None:
        """Send the values of an evaluation step to the loggers."""
        if self.trainer.loggers:
            super().update_eval_step_metrics(step)
