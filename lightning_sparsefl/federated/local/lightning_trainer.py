"""The local engine for modules that the fast engine does not support: a real Lightning ``Trainer`` for each client."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_sparsefl.federated.local.fast.batch_scores import PartScore
from lightning_sparsefl.federated.local.fast.batches import OneBatch
from lightning_sparsefl.federated.local.fast.steps import as_failure
from lightning_sparsefl.federated.local.fast.support import require_automatic
from lightning_sparsefl.federated.local.isolation import isolate_metrics, restore_trainer_refs
from lightning_sparsefl.federated.local.local_options import LocalOptions


class ResidentStrategy(SingleDeviceStrategy):
    """Strategy that leaves the module on its device after a fit, so that its tensors stay views of the flat vector."""

    def setup(self, trainer: Trainer) -> None:
        """Isolate the metrics, all of which exist after the module's own `setup`, then set up as usual."""
        isolate_metrics(trainer.lightning_module)
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; a StopIteration is a failure."""
        return _step("training_step", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; a StopIteration is a failure."""
        return _step("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; a StopIteration is a failure."""
        return _step("test_step", super().test_step, *args, **kwargs)

    def teardown(self) -> None:
        """Release precision plugin and accelerator, but leave the module in place."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


def _step(name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return step(*args, **kwargs)
    except StopIteration as error:
        raise as_failure(name, error) from error


def _set_datamodule(trainer: Any, datamodule: Any) -> None:
    """Assign `trainer.datamodule` without the Trainer setting the data module up for each client."""
    trainer.datamodule = datamodule
    trainer._data_connector._datahook_selector.datamodule = datamodule


class _AttachDataModule(Callback):
    """First callback: attaches the data module before the hooks of the other callbacks run."""

    def __init__(self, datamodule: Any) -> None:
        self._datamodule = datamodule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _set_datamodule(trainer, self._datamodule)


class _DetachDataModule(Callback):
    """Last callback: detaches the data module before the Trainer would tear it down."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _set_datamodule(trainer, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.VALIDATING:
            _set_datamodule(trainer, None)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _set_datamodule(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _set_datamodule(trainer, None)


def _with_datamodule(callbacks: Sequence[Callback], datamodule: Any) -> list[Callback]:
    """Return callbacks between those that attach and detach a data module."""
    return [*callbacks] if datamodule is None else [_AttachDataModule(datamodule), *callbacks, _DetachDataModule()]


class _GradientReady(Exception):
    """Signal that ends a run after its first backward pass and the module's `on_after_backward`."""


class _StopBeforeStep(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        raise _GradientReady


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages and warnings that every new Trainer repeats, useless once per client."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # Lightning under torch >= 2.10
            yield
    finally:
        log.setLevel(level)


class LightningEngine:
    """Engine that trains clients in sequence, each with its own Trainer on this rank's device.

    Args:
        fabric: Fabric that determines the device and the precision.
        options: Options of local training.
    """

    def __init__(self, fabric: Fabric, options: LocalOptions) -> None:
        self.fabric, self.options = fabric, options
        self.global_step = 0

    def for_epochs(self, epochs: int) -> LightningEngine:
        """Return an engine with the same options except for the number of local epochs."""
        return LightningEngine(self.fabric, replace(self.options, max_epochs=epochs))

    def fit(
        self,
        module: LightningModule,
        train_loader: Any,
        val_loader: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        datamodule: Any = None,
    ) -> dict[str, Tensor]:
        """Train one client; see :meth:`lightning_sparsefl.federated.local.engines.FastEngine.fit`."""
        attached = _with_datamodule(callbacks, datamodule)
        with restore_trainer_refs(module, attached), _quiet():
            trainer = self._trainer(attached, loggers)
            try:
                trainer.fit(module, train_loader, val_loader)
            finally:
                self.global_step = trainer.global_step
            return dict(trainer.callback_metrics)

    def evaluate(
        self,
        module: LightningModule,
        loader: Any,
        *,
        stage: Literal["validate", "test"],
        callbacks: Sequence[Callback] = (),
        datamodule: Any = None,
    ) -> dict[str, float]:
        """Evaluate one client; see :meth:`~lightning_sparsefl.federated.local.engines.FastEngine.evaluate`."""
        attached = _with_datamodule(callbacks, datamodule)
        with restore_trainer_refs(module, attached), _quiet():
            trainer = self._trainer(attached)
            getattr(trainer, stage)(module, loader, verbose=False)
            return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def evaluate_part(self, module: LightningModule, loader: Any, **options: Any) -> PartScore:
        """Return that only one process can evaluate, since a Trainer passes over the whole loader.

        Args:
            module: Module to evaluate.
            loader: Loader of all labelled batches.
            **options: Options of :meth:`~lightning_sparsefl.federated.local.engines.FastEngine.evaluate_part`.
        """
        return PartScore(indivisible="it is evaluated by a Lightning Trainer")

    def gradient(self, module: LightningModule, batch: Any, batch_idx: int = 0, *, datamodule: Any = None) -> None:
        """Compute a gradient as :meth:`~lightning_sparsefl.federated.local.engines.FastEngine.gradient` does.

        Args:
            module: Module in the mode (training or evaluation) to use; its weights do not change.
            batch: Batch from the client's loader.
            batch_idx: Ignored; the Trainer passes 0 to `training_step`.
            datamodule: Object that becomes `trainer.datamodule`.
        """
        require_automatic(module)
        with restore_trainer_refs(module, ()), _quiet():
            whole: dict[str, Any] = {
                "max_epochs": 1,
                "max_steps": -1,
                "accumulate_grad_batches": 1,
                "limit_train_batches": 1.0,
            }
            trainer = self._trainer(_with_datamodule([_StopBeforeStep()], datamodule), **whole)
            if trainer.scaler is not None:
                vars(trainer.precision_plugin)["scaler"] = None  # the caller needs unscaled gradients
            try:
                trainer.fit(module, OneBatch(batch))
            except _GradientReady:
                isolate_metrics(module)

    def _trainer(self, callbacks: Sequence[Callback], loggers: Sequence[Logger] = (), **options: Any) -> Trainer:
        device = self.fabric.device
        trainer = Trainer(
            **{**vars(self.options), **options},
            accelerator=device.type,
            devices=1,
            strategy=ResidentStrategy(device=device),
            precision=self.fabric.strategy.precision.precision,
            logger=list(loggers),
            callbacks=list(callbacks),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        # the run handles signals itself: a Trainer would stop in the middle of a client, or requeue its SLURM job
        vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
        return trainer
