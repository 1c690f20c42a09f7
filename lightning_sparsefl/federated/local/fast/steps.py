"""The work of one training batch in Lightning's order: step, gradients, optimizer, learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_sparsefl.federated.local.fast.direct_calls import run_backward, step_optimizer, zero_gradients
from lightning_sparsefl.federated.local.fast.hooks import Hooks

_warnings = WarningCache()


@contextmanager
def warnings_forgotten() -> Iterator[None]:
    """Give the warnings of steps again that were given in the context, such as that of a trial, which shows none."""
    known = set(_warnings)
    try:
        yield
    finally:
        _warnings.intersection_update(known)


def as_failure(name: str, error: StopIteration) -> RuntimeError:
    """Return the error to raise instead of a StopIteration of a step, which would end the epoch as if it were over.

    Args:
        name: Name of the step.
        error: Error of the step.
    """
    return RuntimeError(f"`{name}` raised StopIteration({error}), as `next` does at the end of an iterator")


class StepCaller:
    """Callable that runs `training_step`, `validation_step` or `test_step` in the context of the precision plugin.

    Args:
        hooks: Hooks of the module.
        module: Module of the user.
        name: Name of the step.
        plugin: Precision plugin of the trainer.
    """

    def __init__(self, hooks: Hooks, module: Any, name: str, plugin: Precision) -> None:
        self._hooks, self._name = hooks, name
        self._takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
        self._plugin = None if type(plugin) is Precision else plugin

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._plugin is None else self._plugin.forward_context()

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """Run the step on a batch and return its output."""
        try:
            with self._context():
                if self._takes_index:
                    return self._hooks.call_module(self._name, batch, batch_idx)
                return self._hooks.call_module(self._name, batch)
        except StopIteration as error:
            raise as_failure(self._name, error) from error


class AutomaticStep:
    """The closure of automatic optimization, reused for all batches: step, zero the gradients, backward.

    Args:
        trainer: Trainer of this client.
        hooks: Hooks of its module and callbacks.
    """

    def __init__(self, trainer: Any, hooks: Hooks) -> None:
        self._trainer, self._hooks, self._module = trainer, hooks, trainer.lightning_module
        self._plugin = trainer.precision_plugin
        self._step = StepCaller(hooks, self._module, "training_step", self._plugin)
        # only a loss scaler or an overridden `optimizer_step` needs Lightning's optimizer wrapper
        self._scaled = getattr(self._plugin, "scaler", None) is not None
        self._use_optimizer_step = self._scaled or "optimizer_step" in hooks.overridden
        self._own_clipping = bool({"configure_gradient_clipping", "clip_gradients"} & hooks.overridden)
        self._batch: Any = None
        self._batch_idx = 0
        self._result: ClosureResult | None = None
        self._loss: Tensor | None = None

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on one batch.

        Args:
            batch: Batch on the device.
            batch_idx: Index of the batch within the epoch.
            accumulate: Whether to accumulate gradients without an optimizer step.

        Returns:
            The argument `outputs` of `on_train_batch_end`.
        """
        self._batch, self._batch_idx = batch, batch_idx
        if accumulate:
            self()
        elif self._use_optimizer_step:
            optimizer = self._trainer.strategy._lightning_optimizers[0]
            self._hooks.call_module("optimizer_step", self._trainer.current_epoch, batch_idx, optimizer, self)
            self._trainer.fit_loop.optimizer_steps += 1
        else:
            step_optimizer(self._trainer.optimizers[0], self._closure)
            self._trainer.fit_loop.optimizer_steps += 1
        self._batch = None
        return self._outputs()

    def _closure(self) -> Tensor | None:
        loss = self()
        optimizer = self._trainer.optimizers[0]
        self._hooks.both("on_before_optimizer_step", optimizer)
        if self._own_clipping or self._trainer.gradient_clip_val:
            self._hooks.call_module(
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=self._trainer.gradient_clip_val,
                gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
            )
        return loss

    @torch.enable_grad()
    def __call__(self) -> Tensor | None:
        """Run the step and its backward pass; return the detached loss, or None if the step was skipped."""
        parts = self._trainer.accumulate_grad_batches
        output = self._step(self._batch, self._batch_idx)
        if type(output) is Tensor:  # the common case, without Lightning's parsing
            loss: Tensor | None = output if parts == 1 else output / parts
            self._result, self._loss = None, loss.detach().clone()  # type: ignore[union-attr]
        else:
            self._result = ClosureResult.from_training_step_output(output, parts)
            loss, self._loss = self._result.closure_loss, self._result.loss
        if loss is None:
            _warnings.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        if self._batch_idx % parts == 0:
            self._zero_grad()
        if loss is not None:
            self._backward(loss)
        return self._loss

    @torch.enable_grad()
    def gradients(self, batch: Any, batch_idx: int) -> None:
        """Accumulate the gradients of one batch's loss without an optimizer step."""
        loss = ClosureResult.from_training_step_output(self._step(batch, batch_idx)).closure_loss
        if loss is not None:
            self._backward(loss)

    def _zero_grad(self) -> None:
        optimizer = self._trainer.optimizers[0]
        self._hooks.both("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self._hooks.overridden:
            self._hooks.call_module("optimizer_zero_grad", self._trainer.current_epoch, self._batch_idx, optimizer)
        else:
            zero_gradients(optimizer)

    def _backward(self, loss: Tensor) -> None:
        if self._scaled:
            loss = self._plugin.scaler.scale(loss)
        self._hooks.both("on_before_backward", loss)
        if "backward" in self._hooks.overridden:
            self._hooks.call_module("backward", loss)
        else:
            run_backward(loss)
        self._hooks.both("on_after_backward")

    def _outputs(self) -> dict[str, Any]:
        result, loss, self._result, self._loss = self._result, self._loss, None, None
        if loss is None:
            return {}
        return {"loss": loss} if result is None else result.asdict()


class ManualStep:
    """One batch of a module with manual optimization, with Lightning's optimizer wrappers.

    Args:
        trainer: Trainer of this client.
        hooks: Hooks of its module and callbacks.
    """

    def __init__(self, trainer: Any, hooks: Hooks) -> None:
        self._trainer = trainer
        self._step = StepCaller(hooks, trainer.lightning_module, "training_step", trainer.precision_plugin)

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on one batch; see :meth:`AutomaticStep.run`."""
        wrapped = self._trainer.strategy._lightning_optimizers
        for optimizer in wrapped:
            optimizer._on_after_step = self._count
        output = self._step(batch, batch_idx)
        for optimizer in wrapped:
            optimizer._on_after_step = do_nothing_closure
        return ManualResult.from_training_step_output(output).asdict()

    def _count(self) -> None:
        self._trainer.fit_loop.optimizer_steps += 1


def step_schedulers(trainer: Any, hooks: Hooks, interval: str, index: int, plateau: bool) -> None:
    """Step the learning rate schedulers that are due.

    Args:
        trainer: Trainer of this client.
        hooks: Hooks of its module.
        interval: Interval of the schedulers to step: "step" or "epoch".
        index: Index of the batch or epoch, from 0.
        plateau: Whether to step the schedulers that monitor a metric, or all others.

    Raises:
        MisconfigurationException: If the metric that a scheduler monitors is missing.
    """
    for config in trainer.lr_scheduler_configs:
        due = config.interval == interval and (index + 1) % config.frequency == 0
        if config.reduce_on_plateau != plateau or not due:
            continue
        value = trainer.callback_metrics.get(config.monitor) if plateau else None
        if plateau and value is None:
            message = f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available"
            if config.strict:
                known = list(trainer.callback_metrics)
                raise MisconfigurationException(f"{message}; available metrics are {known}, set the `monitor` key.")
            rank_zero_warn(f"{message} but strict is `False`; skipping its update.", category=RuntimeWarning)
            continue
        hooks.call_module("lr_scheduler_step", config.scheduler, value)
