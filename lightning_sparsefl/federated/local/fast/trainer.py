"""The `trainer` object that modules and callbacks see in the fast engine; a new one for each fit, so no state stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor

from lightning_sparsefl.federated.local.fast.batch_scores import BatchScore
from lightning_sparsefl.federated.local.fast.batches import OneBatch
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples
from lightning_sparsefl.federated.local.fast.hooks import Hooks
from lightning_sparsefl.federated.local.fast.loops import EvalLoop, FitLoop, PartLoop
from lightning_sparsefl.federated.local.fast.results import Calls, LogConnector, log
from lightning_sparsefl.federated.local.fast.trainer_view import TrainerView
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.local_options import LocalOptions

_ACCELERATORS: dict[str, Callable[[], Accelerator]] = {
    "cpu": CPUAccelerator,
    "cuda": CUDAAccelerator,
}
_PRECISIONS = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


def unsupported_fabric_reason(fabric: Fabric) -> str | None:
    """Return why the fast engine does not support the precision or device of a Fabric, or None if it does."""
    precision, device = fabric.strategy.precision.precision, fabric.device.type
    if precision not in _PRECISIONS:
        return f"`trainer.precision` is {precision!r}, not one of {list(_PRECISIONS)}"
    if device not in _ACCELERATORS:
        return f"`trainer.accelerator` gives the device {device!r}, not one of {list(_ACCELERATORS)}"
    return None


def _precision_plugin(precision: str, device: torch.device) -> Precision:
    """Return a new instance of the precision plugin that a Trainer would use, with its own loss scale.

    Fabric's plugins of the same names differ: for mixed precision they convert inputs, hence targets too, to half.
    """
    if precision == "32-true":
        return Precision()
    if precision == "64-true":
        return DoublePrecision()
    if precision.endswith("true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return MixedPrecision(precision, device.type)  # type: ignore[arg-type]


class FastTrainer(TrainerView):
    """Trainer for a single run of one client; a missing attribute raises an ``AttributeError`` with the remedy.

    Args:
        options: Options of local training.
        fabric: Fabric that determines the device and the precision.
        module: Module of the user.
        callbacks: Callbacks of the client.
        loggers: Loggers for the client's metrics.
        datamodule: Object that becomes `trainer.datamodule`; only its hooks of the batch transfer are called.
        precision: Precision of the computation. Default: that of the Fabric.
        samples: Copies of the samples on the device. Default: batches are read on the CPU.
    """

    def __init__(
        self,
        options: LocalOptions,
        fabric: Fabric,
        module: LightningModule,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        datamodule: Any = None,
        precision: str | None = None,
        samples: DeviceSamples | None = None,
    ) -> None:
        self._limits = (options.max_epochs, options.max_steps)
        self.accumulate_grad_batches = options.accumulate_grad_batches
        self.limit_train_batches = options.limit_train_batches
        self.limit_val_batches = options.limit_val_batches
        self.limit_test_batches = options.limit_test_batches
        self.log_every_n_steps = options.log_every_n_steps
        self.gradient_clip_val = options.gradient_clip_val
        algorithm = options.gradient_clip_algorithm
        self.gradient_clip_algorithm = None if algorithm is None else GradClipAlgorithmType(algorithm)
        self.default_root_dir = os.path.normpath(os.path.expanduser(options.default_root_dir))
        self.lightning_module, self.datamodule = module, datamodule
        self.callbacks, self.loggers = _checkpoints_last(callbacks), list(loggers)
        self.should_stop, self.val_check_batch = False, 1
        self.state, self.profiler = TrainerState(), PassThroughProfiler()
        device, precision = fabric.device, precision or str(fabric.strategy.precision.precision)
        self.strategy = SingleDeviceStrategy(
            device, _ACCELERATORS[device.type](), precision_plugin=_precision_plugin(precision, device)
        )
        self.strategy.connect(module)
        self.precision_plugin = self.strategy.precision_plugin
        self.hooks = Hooks(self, module, self.callbacks, datamodule)
        if samples is None or self.hooks.override_transfer:
            samples = DeviceSamples(torch.device("cpu"), limit=0)
        self.device_samples = samples
        self.fit_loop = FitLoop(self, None, None, *self._limits)
        self.eval_loop: EvalLoop | None = None
        self._accelerator_connector = SimpleNamespace(is_distributed=False)
        self._logger_connector = LogConnector(self)  # type: ignore[arg-type]

    @contextmanager
    def running(self, log: Callable[..., None] = log) -> Iterator[None]:
        """Attach the module within the context, and free the optimizers at its end, without the garbage collector.

        Args:
            log: Method `log` of the module within the context, unless the module has one of its own.
        """
        module = self.lightning_module
        module.trainer = self  # type: ignore[assignment]
        replaced = type(module).log is LightningModule.log and "log" not in vars(module)
        if replaced:
            vars(module)["log"] = MethodType(log, module)
        try:
            yield
        except BaseException as exception:
            self._interrupt(exception)
            raise
        finally:
            if replaced:
                vars(module).pop("log", None)
            self.strategy._reset_optimizers_and_schedulers()

    def fit(self, loader: Any, validation: Any = None, calls: Calls | None = None) -> dict[str, Tensor]:
        """Train the module.

        Args:
            loader: Loader of the training batches.
            validation: Loader of the validation batches. Default: no validation.
            calls: Calls of `self.log` in earlier fits of the module. Default: none are known.

        Returns:
            The last value of each logged key.
        """
        if validation is not None and "validation_step" in self.hooks.overridden and self.limit_val_batches > 0:
            self.eval_loop = EvalLoop(self, validation, RunningStage.VALIDATING)
        self.fit_loop = FitLoop(self, loader, self.eval_loop, *self._limits, calls)
        self._start(TrainerFn.FITTING, RunningStage.TRAINING)
        self.strategy.setup_optimizers(self)  # type: ignore[arg-type]
        self.hooks.both("on_fit_start")
        _log_hyperparams(self)  # type: ignore[arg-type]
        self.lightning_module.zero_grad()
        with torch.enable_grad():
            self.fit_loop.run()
        self._close()
        self.hooks.both("on_fit_end")
        return self._finish()

    def evaluate(self, loader: Any, stage: RunningStage) -> dict[str, Tensor]:
        """Validate or test the module and return the value of each logged key."""
        return self._evaluate(EvalLoop(self, loader, stage), stage)

    def evaluate_part(self, loader: Any, stage: RunningStage, part: tuple[int, int]) -> list[BatchScore]:
        """Validate or test the module on a part of the batches, and return what each of them adds to the score."""
        loop = PartLoop(self, loader, stage, part)
        self._evaluate(loop, stage)
        return loop.scores

    def _evaluate(self, loop: EvalLoop, stage: RunningStage) -> dict[str, Tensor]:
        self.eval_loop = loop
        self._start(TrainerFn(stage.value), stage)
        _log_hyperparams(self)  # type: ignore[arg-type]
        self.lightning_module.zero_grad()
        self.eval_loop.run(inference=True)
        self._close()
        return self._finish()

    def evaluate_again(self, loader: Any) -> dict[str, Tensor]:
        """Do as :meth:`evaluate` with another loader, without the set-up that is the same for all loaders.

        Only for a module without hooks beside its steps, and without callbacks, which cannot tell one run from two.

        Args:
            loader: Loader of labelled batches.
        """
        assert self.eval_loop is not None
        self.state.stage, self.state.status = RunningStage(self.state.fn), TrainerStatus.RUNNING
        isolate_metrics(self.lightning_module)
        self._logger_connector.reset_metrics()
        self.eval_loop.rewind(loader)
        self.eval_loop.run(inference=True)
        self._close()
        return self._finish()

    def gradient(self, batch: Any, batch_idx: int) -> None:
        """Compute the gradients of the training loss of one batch, as the first step of a fit does, without logs."""
        if self.scaler is not None:
            self.precision_plugin.scaler = None  # type: ignore[attr-defined]  # the caller needs unscaled gradients
        self.limit_train_batches = 1.0
        self.fit_loop = FitLoop(self, OneBatch(batch), None, 1, -1)
        self._start(TrainerFn.FITTING, RunningStage.TRAINING)
        if "configure_optimizers" in self.hooks.overridden:  # for `self.optimizers()` in the step
            self.strategy.setup_optimizers(self)  # type: ignore[arg-type]
        self.hooks.both("on_fit_start")
        self.lightning_module.zero_grad()
        self.fit_loop.gradients(batch, batch_idx)
        isolate_metrics(self.lightning_module)
        self._finish()

    def _start(self, fn: TrainerFn, stage: RunningStage) -> None:
        """Attach module and callbacks, and run their setup, as `Trainer._run` does before its loops."""
        module = self.lightning_module
        self.state.fn, self.state.stage, self.state.status = fn, stage, TrainerStatus.RUNNING
        for callback in self.callbacks:
            callback.log, callback.log_dict = module.log, module.log_dict  # type: ignore[attr-defined]
        for child in module.modules():
            if isinstance(child, LightningModule):
                child._device = self.strategy.root_device
        for logger in self.loggers:
            _ = getattr(logger, "experiment", None)  # created on first access; the hooks may need it
        self.hooks.callbacks("setup", stage=fn)
        self.hooks.module("setup", stage=fn)
        self.hooks.module("configure_model")
        isolate_metrics(module)
        self._logger_connector.reset_results()
        self._logger_connector.reset_metrics()
        self.precision_plugin.convert_module(module)
        if self.strategy.root_device.type != "cpu":  # there, nothing is to be moved
            self.strategy.model_to_device()

    def _close(self) -> None:
        """Close the loaders and move the metrics to the CPU."""
        loop = self.fit_loop if self.state.fn is TrainerFn.FITTING else self.eval_loop
        if loop is not None:
            loop.close()
        self._logger_connector.teardown()

    def _finish(self) -> dict[str, Tensor]:
        self.hooks.callbacks("teardown", stage=self.state.fn)
        self.hooks.module("teardown", stage=self.state.fn)
        for logger in self.loggers:
            logger.finalize("success")
        self.state.status, self.state.stage = TrainerStatus.FINISHED, None
        return dict(self.callback_metrics)

    def _interrupt(self, exception: BaseException) -> None:
        """Notify callbacks and loggers that the run failed, as Lightning does."""
        self.state.status = TrainerStatus.INTERRUPTED
        try:
            self.hooks.callbacks("on_exception", exception)
            for logger in self.loggers:
                logger.finalize("failed")
        finally:
            self._close()
            self.state.stage = None
            for parameter, wanted in self.lightning_module._param_requires_grad_state.items():
                parameter.requires_grad = wanted  # type: ignore[attr-defined]  # left changed by `toggle_optimizer`
            self.lightning_module._param_requires_grad_state = {}


def _checkpoints_last(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks in their order, with those that save checkpoints moved to the end, as Lightning does."""
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
