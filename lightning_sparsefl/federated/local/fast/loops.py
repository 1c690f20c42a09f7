"""The fast engine's loops over epochs and batches, in the order of Lightning's fit, training and evaluation loops."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import _ModuleMode

from lightning_sparsefl.federated.local.fast.batch_scores import BatchScore, batch_score, metrics_of
from lightning_sparsefl.federated.local.fast.batches import BatchIterator, num_batches
from lightning_sparsefl.federated.local.fast.divisible import Traces, batches_of
from lightning_sparsefl.federated.local.fast.results import Calls, FastResults
from lightning_sparsefl.federated.local.fast.steps import AutomaticStep, ManualStep, StepCaller, step_schedulers
from lightning_sparsefl.federated.local.fast.support import UnknownAttribute


class EvalLoop:
    """One pass over validation or test batches.

    Args:
        trainer: Trainer of this client.
        loader: Loader of the batches.
        stage: Stage of the pass: VALIDATING or TESTING.
    """

    def __init__(self, trainer: Any, loader: Any, stage: RunningStage) -> None:
        self._trainer, self._loader, self._stage = trainer, loader, stage
        self._name = "test" if stage is RunningStage.TESTING else "validation"
        self.results = FastResults(training=False)
        self.batches: BatchIterator | None = None
        self.ready = self._first = 0
        self._seen = 0
        self._step: StepCaller | None = None

    def rewind(self, loader: Any) -> None:
        """Prepare a pass over another loader, as the first one; checked calls of `self.log` are still known.

        Args:
            loader: Loader of the batches.
        """
        self._loader, self.batches, self.ready, self._seen = loader, None, 0, 0
        self.results = self.results.emptied()

    def setup_data(self) -> None:
        """Prepare the loader at the first call."""
        limit = getattr(self._trainer, f"limit_{self._stage.dataloader_prefix}_batches")
        if self.batches is None and limit != 0:
            self.batches = BatchIterator(self._trainer, self._loader, self._stage, limit)

    def close(self) -> None:
        """Stop the loader's workers."""
        if self.batches is not None:
            self.batches.close()

    def run(self, inference: bool) -> None:
        """Evaluate all batches, and restore the training modes of the submodules.

        Args:
            inference: Whether to use ``torch.inference_mode`` instead of ``torch.no_grad``.
        """
        with torch.inference_mode() if inference and not _gloo() else torch.no_grad():
            self.setup_data()
            if self.batches is not None and self.batches.length:
                self._run(self.batches)

    def _run(self, batches: BatchIterator) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        self.ready = self._first
        batches.set_epoch(trainer.fit_loop.epochs_processed)
        batches.start()
        if self._step is None:
            hooks = (f"{self._name}_step", f"on_{self._name}_batch_start", f"on_{self._name}_batch_end")
            _verify_dataloader_idx_requirement(hooks, False, self._stage, module)
            self._step = StepCaller(trainer.hooks, module, f"{self._name}_step", trainer.precision_plugin)
        modes = _ModuleMode()
        modes.capture(module)
        try:
            trainer.hooks.call_module(f"on_{self._name}_model_eval")
            self._epoch(batches, self._step)
        except BaseException:
            modes.restore(module)
            raise
        if f"on_{self._name}_model_train" in trainer.hooks.overridden:
            trainer.hooks.call_module(f"on_{self._name}_model_train")
        else:
            modes.restore(module)

    def _epoch(self, batches: BatchIterator, step: StepCaller) -> None:
        hooks, connector = self._trainer.hooks, self._trainer._logger_connector
        hooks.both(f"on_{self._name}_start")
        hooks.both(f"on_{self._name}_epoch_start")
        try:
            while True:
                self._batch(next(batches), step)
        except StopIteration:
            pass
        connector.epoch_end_reached()
        logged = connector.update_eval_epoch_metrics()
        connector._evaluation_epoch_end()
        hooks.both(f"on_{self._name}_epoch_end")
        connector.on_epoch_end()
        logged.update(connector.update_eval_epoch_metrics())
        connector.log_eval_end_metrics(logged)
        hooks.both(f"on_{self._name}_end")
        connector.reset_results()

    def _batch(self, batch: Any, step: StepCaller) -> None:
        hooks, connector, index = self._trainer.hooks, self._trainer._logger_connector, self.ready
        self.ready += 1
        connector.on_batch_start(batch)
        hooks.both(f"on_{self._name}_batch_start", batch, index)
        output = step(batch, index)
        hooks.both(f"on_{self._name}_batch_end", output, batch, index)
        connector.on_batch_end()
        connector.update_eval_step_metrics(self._seen)
        self._seen += 1


class PartLoop(EvalLoop):
    """A pass over some consecutive batches, which keeps what each of them adds to the score.

    Args:
        trainer: Trainer of this pass.
        loader: Loader of all batches.
        stage: Stage of the pass: VALIDATING or TESTING.
        part: Number of this part, and number of all parts.
    """

    def __init__(self, trainer: Any, loader: Any, stage: RunningStage, part: tuple[int, int]) -> None:
        super().__init__(trainer, loader, stage)
        self._part = part
        self.scores: list[BatchScore] = []

    def setup_data(self) -> None:
        """Prepare a loader of this part's batches at the first call."""
        limit = getattr(self._trainer, f"limit_{self._stage.dataloader_prefix}_batches")
        if self.batches is None and limit != 0:
            number, count = self._part
            total = num_batches(self._stage, len(self._loader), limit)
            self._first, last = total * number // count, total * (number + 1) // count
            part = batches_of(self._loader, self._first, last)
            self.batches = BatchIterator(self._trainer, part, self._stage, last - self._first)

    def _epoch(self, batches: BatchIterator, step: StepCaller) -> None:
        """Score batch by batch; the module has no hooks at the start and the end of an epoch."""
        module = self._trainer.lightning_module
        metrics, traces = metrics_of(module), Traces(module, self._trainer.strategy.root_device)
        for _ in range(batches.length):
            self.results = FastResults(training=False)
            self._batch(next(batches), step)
            self.scores.append(batch_score(self.results, metrics))
            for metric in metrics.values():
                metric.reset()
        traces.check()


def _gloo() -> bool:
    """Return whether the process group uses Gloo, which does not support inference mode; Lightning avoids it too."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo"


class FitLoop(UnknownAttribute):
    """The loop over one client's epochs and batches, available to callbacks as `trainer.fit_loop`.

    Args:
        trainer: Trainer of this client.
        loader: Loader of the training batches.
        validation: Evaluation loop to run after each epoch, or None.
        max_epochs: Number of epochs to train for; -1 = unlimited.
        max_steps: Number of optimizer steps to train for; -1 = unlimited.
        calls: Calls of `self.log` in earlier fits of the module. Default: none are known.
    """

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        validation: EvalLoop | None,
        max_epochs: int,
        max_steps: int,
        calls: Calls | None = None,
    ) -> None:
        self._trainer, self._loader, self._validation = trainer, loader, validation
        self.max_epochs, self.max_steps, self.min_epochs, self.min_steps = max_epochs, max_steps, 0, None
        self.results = FastResults(training=True, calls=calls)
        self.batches: BatchIterator | None = None
        self.max_batches: int | float = float("inf")
        self.epochs_processed = self.epochs_completed = 0
        self.optimizer_steps = self._batches_that_stepped = 0
        self._ready = self._ready_before = 0
        self.is_last_batch = False
        self._step: AutomaticStep | ManualStep | None = None

    @property
    def epoch_loop(self) -> FitLoop:
        """This loop; Lightning has a nested loop under this name."""
        return self

    @property
    def batch_idx(self) -> int:
        """Index of the batch within the epoch, from 0."""
        return self._ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the batch within the fit, from 0."""
        return self._ready_before + self._ready - 1

    def setup_data(self) -> None:
        """Prepare the loader and start the first pass at the first call, which may be `estimated_stepping_batches`."""
        trainer = self._trainer
        if self.batches is None and trainer.limit_train_batches != 0:
            self.batches = BatchIterator(trainer, self._loader, RunningStage.TRAINING, trainer.limit_train_batches)
            self.batches.start()
            self.max_batches = self.batches.length
            trainer.val_check_batch = max(1, self.batches.length)

    def _done(self) -> bool:
        steps, epochs = (
            self._steps_reached(),
            self.max_epochs != -1 and self.epochs_processed >= self.max_epochs,
        )
        if epochs and not steps and self.max_batches != 0:
            self.epochs_completed = self.epochs_processed
        return self.max_batches == 0 or steps or epochs or bool(self._trainer.should_stop)

    def _steps_reached(self) -> bool:
        return self.max_steps != -1 and self.optimizer_steps >= self.max_steps

    def _epoch_over(self) -> bool:
        return self.is_last_batch or self._ready == self.max_batches

    def _should_accumulate(self) -> bool:
        return self._ready % self._trainer.accumulate_grad_batches != 0 and not self._epoch_over()

    def _should_check_val_epoch(self) -> bool:
        return self._validation is not None

    def run(self) -> None:
        """Train until the limit of epochs or steps, or until a callback stops the training."""
        self.setup_data()
        if self._done() or self.batches is None:
            return
        trainer, hooks = self._trainer, self._trainer.hooks
        self._step = (AutomaticStep if trainer.lightning_module.automatic_optimization else ManualStep)(trainer, hooks)
        if self._validation is not None:
            self._validation.setup_data()
        hooks.both("on_train_start")
        while not self._done():
            self.batches.set_epoch(self.epochs_processed)
            hooks.both("on_train_epoch_start")
            self._epoch(self.batches)
            self._epoch_end()
        hooks.both("on_train_end")

    def gradients(self, batch: Any, batch_idx: int) -> None:
        """Compute the gradients of one batch, the only one of the loader, as the first step does.

        Args:
            batch: The batch.
            batch_idx: Index that the step and its hooks get.
        """
        trainer, hooks = self._trainer, self._trainer.hooks
        self.setup_data()
        hooks.both("on_train_start")
        hooks.both("on_train_epoch_start")
        self.is_last_batch, self._ready = True, 1
        batch = hooks.to_device(trainer.precision_plugin.convert_input(batch), trainer.strategy.root_device)
        trainer._logger_connector.on_batch_start(batch)
        hooks.both("on_train_batch_start", batch, batch_idx)
        AutomaticStep(trainer, hooks).gradients(batch, batch_idx)

    def _epoch(self, batches: BatchIterator) -> None:
        self._ready_before, self._ready, self.is_last_batch = self._ready_before + self._ready, 0, False
        if self.epochs_completed > 0:
            batches.start()
        try:
            while not (self._steps_reached() or self._epoch_over() or self._trainer.should_stop):
                self._batch(batches)
                self._batch_end()
        except StopIteration:  # the loader ended early, or `on_train_batch_start` returned -1
            pass

    def _batch(self, batches: BatchIterator) -> None:
        hooks, connector = self._trainer.hooks, self._trainer._logger_connector
        batch = next(batches)
        self.is_last_batch, index = batches.done, self._ready
        self._ready += 1
        connector.on_batch_start(batch)
        skip, outputs = False, None
        if batch is not None:
            hooks.callbacks("on_train_batch_start", batch, index)
            skip = hooks.module("on_train_batch_start", batch, index) == -1
            if skip:
                self.is_last_batch = True
            else:
                outputs = self._step.run(batch, index, self._should_accumulate())  # type: ignore[union-attr]
        self._schedulers("step", plateau=False)
        if self._epoch_over():
            self._schedulers("epoch", plateau=False)
        if skip:
            raise StopIteration
        hooks.both("on_train_batch_end", outputs, batch, index)
        connector.on_batch_end()
        connector.update_train_step_metrics()

    def _batch_end(self) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        due = trainer.should_stop or self._ready % trainer.val_check_batch == 0
        if self._validation is not None and due:
            trainer.validating, first = True, connector._first_loop_iter
            if not self._should_accumulate():
                trainer.hooks.call_module("on_validation_model_zero_grad")
            self._validation.run(inference=False)
            trainer.training = True
            connector._first_loop_iter = first
        self._schedulers("step", plateau=True)
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        if trainer.should_stop:
            for logger in trainer.loggers:
                logger.save()

    def _epoch_end(self) -> None:
        hooks, connector = self._trainer.hooks, self._trainer._logger_connector
        connector.epoch_end_reached()
        self.epochs_processed += 1
        hooks.callbacks("on_train_epoch_end", monitoring=False)
        hooks.module("on_train_epoch_end")
        hooks.callbacks("on_train_epoch_end", monitoring=True)
        connector.on_epoch_end()
        if self._epoch_over():
            self._schedulers("epoch", plateau=True)
        self._batches_that_stepped -= 1  # epoch values are logged at the step of the epoch's last batch
        connector.update_train_epoch_metrics()
        self._batches_that_stepped += 1
        self.epochs_completed += 1

    def _schedulers(self, interval: str, *, plateau: bool) -> None:
        trainer = self._trainer
        if not trainer.lr_scheduler_configs or not trainer.lightning_module.automatic_optimization:
            return
        if interval == "epoch" or not self._should_accumulate():
            index = self.batch_idx if interval == "step" else self.epochs_completed
            step_schedulers(trainer, trainer.hooks, interval, index, plateau)

    def close(self) -> None:
        """Stop the loaders' workers."""
        if self.batches is not None:
            self.batches.close()
        if self._validation is not None:
            self._validation.close()
