"""The attributes that modules and callbacks read of a trainer, for one that trains one client."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import Tensor

from lightning_sparsefl.federated.local.fast_loops import EvalLoop, FitLoop
from lightning_sparsefl.federated.local.results import FastResults, LogConnector
from lightning_sparsefl.federated.local.support import UnknownAttribute


class TrainerView(UnknownAttribute):
    """What a :class:`lightning.pytorch.Trainer` on one device shows under the same names."""

    barebones = fast_dev_run = sanity_checking = predicting = received_sigterm = False
    is_global_zero = True
    check_val_every_n_epoch, val_check_interval, reload_dataloaders_every_n_epochs = 1, 1.0, 0
    num_sanity_val_steps, overfit_batches, ckpt_path = 0, 0.0, None
    global_rank = local_rank = node_rank = 0
    world_size = num_nodes = num_devices = 1

    state: TrainerState
    strategy: SingleDeviceStrategy
    precision_plugin: Precision
    lightning_module: LightningModule
    callbacks: list[Callback]
    loggers: list[Logger]
    fit_loop: FitLoop
    eval_loop: EvalLoop | None
    accumulate_grad_batches: int
    default_root_dir: str
    _logger_connector: LogConnector

    @property
    def training(self) -> bool:
        """Whether it trains now."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self.state.stage = RunningStage.TRAINING if value else None

    @property
    def validating(self) -> bool:
        """Whether it validates now."""
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self.state.stage = RunningStage.VALIDATING if value else None

    @property
    def testing(self) -> bool:
        """Whether it tests now."""
        return self.state.stage is RunningStage.TESTING

    @property
    def evaluating(self) -> bool:
        """Whether it validates or tests now."""
        return self.validating or self.testing

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended it."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def current_epoch(self) -> int:
        """Epochs finished."""
        return self.fit_loop.epochs_completed

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.fit_loop.optimizer_steps

    @property
    def max_steps(self) -> int:
        """Steps to train for; -1 = no limit."""
        return self.fit_loop.max_steps

    @property
    def max_epochs(self) -> int:
        """Epochs to train for."""
        return self.fit_loop.max_epochs

    @property
    def min_epochs(self) -> int:
        """Epochs to train for at least."""
        return self.fit_loop.min_epochs

    @property
    def min_steps(self) -> None:
        """Steps to train for at least."""
        return None

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the last batch of the epoch."""
        return self.fit_loop.is_last_batch

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch; infinite until the loader has been looked at."""
        return self.fit_loop.max_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of a validation pass."""
        return [self.eval_loop.feed.length] if self.eval_loop is not None and self.eval_loop.feed is not None else []

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of a test pass."""
        return self.num_val_batches if self.state.fn is TrainerFn.TESTING else []

    @property
    def enable_validation(self) -> bool:
        """Whether epochs end with a validation pass."""
        return self.eval_loop is not None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that the fit will take; -1 epochs mean no limit."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        self.fit_loop.setup_data()
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def log_step(self) -> int | None:
        """What `log_every_n_steps` counts now; None between the loops."""
        if self.training:
            return self.fit_loop._batches_that_stepped + 1
        return self.eval_loop.ready if self.evaluating and self.eval_loop is not None else None

    @property
    def _results(self) -> FastResults | None:
        if self.training:
            return self.fit_loop.results
        return self.eval_loop.results if self.evaluating and self.eval_loop is not None else None

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of each logged key."""
        return self._logger_connector.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What went to the loggers."""
        return self._logger_connector.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What a progress bar would show."""
        return self._logger_connector.progress_bar_metrics

    @property
    def optimizers(self) -> list[Any]:
        """This client's optimizers."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self.strategy.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """This client's learning rate schedulers."""
        return self.strategy.lr_scheduler_configs

    @property
    def model(self) -> LightningModule:
        """The module."""
        return self.lightning_module

    @property
    def accelerator(self) -> Any:
        """Of the device."""
        return self.strategy.accelerator

    @property
    def device_ids(self) -> list[int]:
        """The index of the device."""
        return [self.strategy.root_device.index or 0]

    @property
    def precision(self) -> str:
        """As for Lightning's Trainer."""
        return self.precision_plugin.precision

    @property
    def scaler(self) -> Any:
        """Of the loss, in 16-mixed."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """Where the first logger writes."""
        if self.logger is None:
            return self.default_root_dir
        return self.logger.log_dir if isinstance(self.logger, (TensorBoardLogger, CSVLogger)) else self.logger.save_dir

    @property
    def train_dataloader(self) -> Any:
        """The training loader, once it has been looked at."""
        return self.fit_loop.feed and self.fit_loop.feed.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, once it has been looked at."""
        return None if self.eval_loop is None or self.testing else self.eval_loop.feed and self.eval_loop.feed.loader

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, once it has been looked at."""
        return self.eval_loop.feed and self.eval_loop.feed.loader if self.testing and self.eval_loop else None

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The callbacks that stop early."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first of them."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first of them."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print."""
        print(*args, **kwargs)
