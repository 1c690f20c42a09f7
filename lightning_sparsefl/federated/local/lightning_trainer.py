"""The client loop for what the fast one does not serve: a real Lightning ``Trainer`` for each client."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_sparsefl.federated.local.isolation import isolate_metrics, restore_trainer_refs
from lightning_sparsefl.federated.local.support import require_automatic

if TYPE_CHECKING:
    from lightning_sparsefl.federated.local.engines import LocalOptions


class ResidentStrategy(SingleDeviceStrategy):
    """Leaves the module on its device after a fit, so that its tensors stay views of the engine's vector."""

    def setup(self, trainer: Trainer) -> None:
        """Also keep the metrics apart, now that the module's own `setup` has made them all."""
        isolate_metrics(trainer.lightning_module)
        super().setup(trainer)

    def teardown(self) -> None:
        """Release all but the module."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


def _show(trainer: Any, datamodule: Any) -> None:
    """Make a data module `trainer.datamodule` without the Trainer's setting it up for each client."""
    trainer.datamodule = datamodule
    trainer._data_connector._datahook_selector.datamodule = datamodule


class _ShowData(Callback):
    """Stands first, so that the hooks after it see the data module."""

    def __init__(self, datamodule: Any) -> None:
        self._datamodule = datamodule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _show(trainer, self._datamodule)


class _HideData(Callback):
    """Stands last, before the Trainer would tear the data module down."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _show(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _show(trainer, None)


class _GradientTaken(Exception):
    """Ends a run after its first backward pass."""


class _TakeGradient(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise _GradientTaken


class _OneBatch:
    """A loader of one batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._batch


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what a Trainer tells whoever starts one by hand, which is of no use once per client."""
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
    """Trains client after client, each with a Trainer of its own on this rank's device.

    Args:
        fabric: Says on which device, and at which precision.
        options: How every client trains.
    """

    def __init__(self, fabric: Fabric, options: LocalOptions) -> None:
        self.fabric, self.options = fabric, options
        self.global_step = 0

    def for_epochs(self, epochs: int) -> LightningEngine:
        """The same, but for the number of local epochs."""
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
        attached = [*callbacks] if datamodule is None else [_ShowData(datamodule), *callbacks, _HideData()]
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
        """Score one client; see :meth:`lightning_sparsefl.federated.local.engines.FastEngine.evaluate`."""
        attached = [*callbacks] if datamodule is None else [_ShowData(datamodule), *callbacks, _HideData()]
        with restore_trainer_refs(module, attached), _quiet():
            trainer = self._trainer(attached)
            getattr(trainer, stage)(module, loader, verbose=False)
            return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def gradient(self, module: LightningModule, batch: Any, batch_idx: int = 0) -> None:
        """See :meth:`lightning_sparsefl.federated.local.engines.FastEngine.gradient`; `batch_idx` is always 0 here."""
        require_automatic(module)
        with restore_trainer_refs(module, ()), _quiet():
            trainer = self._trainer([_TakeGradient()], max_epochs=1, max_steps=-1, accumulate_grad_batches=1)
            if trainer.scaler is not None:
                vars(trainer.precision_plugin)["scaler"] = None  # the gradients are wanted unscaled
            try:
                trainer.fit(module, _OneBatch(batch))
            except _GradientTaken:
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
        # signals are the run's concern: a Trainer would end the client in the middle, or requeue its SLURM job
        vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
        return trainer
