"""One training batch: the step, its gradients, the optimizer and the learning rates, in Lightning's order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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

from lightning_sparsefl.federated.local.hooks import Hooks

_warnings = WarningCache()


class StepCaller:
    """Calls `training_step`, `validation_step` or `test_step` under the precision's context.

    Args:
        hooks: Of the module.
        module: The user's.
        name: Of the step.
        plugin: The precision.
    """

    def __init__(self, hooks: Hooks, module: Any, name: str, plugin: Precision) -> None:
        self._hooks, self._name = hooks, name
        self._takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
        self._plugin = None if type(plugin) is Precision else plugin

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._plugin is None else self._plugin.forward_context()

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """What the step returns for a batch."""
        with self._context():
            if self._takes_index:
                return self._hooks.always(self._name, batch, batch_idx)
            return self._hooks.always(self._name, batch)


class AutomaticStep:
    """The closure of automatic optimization, one object for all batches: step, zero the gradients, backward.

    Args:
        trainer: Of this client.
        hooks: Of its module and callbacks.
    """

    def __init__(self, trainer: Any, hooks: Hooks) -> None:
        self._trainer, self._hooks, self._module = trainer, hooks, trainer.lightning_module
        self._plugin = trainer.precision_plugin
        self._step = StepCaller(hooks, self._module, "training_step", self._plugin)
        # only a scaler and the module's own `optimizer_step` need Lightning's longer way round the optimizer
        self._scaled = getattr(self._plugin, "scaler", None) is not None
        self._long_way = self._scaled or "optimizer_step" in hooks.overridden
        self._own_clipping = bool({"configure_gradient_clipping", "clip_gradients"} & hooks.overridden)
        self._batch: Any = None
        self._batch_idx = 0
        self._result: ClosureResult | None = None
        self._loss: Tensor | None = None

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on one batch.

        Args:
            batch: On the device.
            batch_idx: Within the epoch.
            accumulate: Only add to the gradients, and leave the optimizer for a later batch.

        Returns:
            What `on_train_batch_end` gets as `outputs`.
        """
        self._batch, self._batch_idx = batch, batch_idx
        if accumulate:
            self()
        elif self._long_way:
            optimizer = self._trainer.strategy._lightning_optimizers[0]
            self._hooks.always("optimizer_step", self._trainer.current_epoch, batch_idx, optimizer, self)
            self._trainer.fit_loop.optimizer_steps += 1
        else:
            self._trainer.optimizers[0].step(closure=self._closure)
            self._trainer.fit_loop.optimizer_steps += 1
        self._batch = None
        return self._outputs()

    def _closure(self) -> Tensor | None:
        loss = self()
        optimizer = self._trainer.optimizers[0]
        self._hooks.both("on_before_optimizer_step", optimizer)
        if self._own_clipping or self._trainer.gradient_clip_val:
            self._hooks.always(
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=self._trainer.gradient_clip_val,
                gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
            )
        return loss

    @torch.enable_grad()
    def __call__(self) -> Tensor | None:
        """The step, and its gradients; the loss without its graph, None if the step was skipped."""
        parts = self._trainer.accumulate_grad_batches
        output = self._step(self._batch, self._batch_idx)
        if type(output) is Tensor:  # Lightning's parsing, for what nearly every module returns
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
        """Add the gradients of one batch's loss, without an optimizer."""
        loss = ClosureResult.from_training_step_output(self._step(batch, batch_idx)).closure_loss
        if loss is not None:
            self._backward(loss)

    def _zero_grad(self) -> None:
        optimizer = self._trainer.optimizers[0]
        self._hooks.both("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self._hooks.overridden:
            self._hooks.always("optimizer_zero_grad", self._trainer.current_epoch, self._batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _backward(self, loss: Tensor) -> None:
        if self._scaled:
            loss = self._plugin.scaler.scale(loss)
        self._hooks.both("on_before_backward", loss)
        if "backward" in self._hooks.overridden:
            self._hooks.always("backward", loss)
        else:
            loss.backward()
        self._hooks.both("on_after_backward")

    def _outputs(self) -> dict[str, Any]:
        result, loss, self._result, self._loss = self._result, self._loss, None, None
        if loss is None:
            return {}
        return {"loss": loss} if result is None else result.asdict()


class ManualStep:
    """One batch of a module that optimizes by itself, through Lightning's strategy.

    Args:
        trainer: Of this client.
        hooks: Of its module and callbacks.
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
        trainer: Of this client.
        hooks: Of its module.
        interval: "step" or "epoch".
        index: Number of the batch or epoch, from 0.
        plateau: Whether those are meant that wait for a metric, or the others.

    Raises:
        MisconfigurationException: If the metric that a scheduler waits for is missing.
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
        hooks.always("lr_scheduler_step", config.scheduler, value)
