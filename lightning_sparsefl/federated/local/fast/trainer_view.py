"""The attributes of a Lightning trainer that modules and callbacks read, for a trainer of one client."""

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

from lightning_sparsefl.federated.local.fast.loops import EvalLoop, FitLoop
from lightning_sparsefl.federated.local.fast.results import FastResults, LogConnector
from lightning_sparsefl.federated.local.fast.support import UnknownAttribute


class TrainerView(UnknownAttribute):
    """The attributes of a :class:`lightning.pytorch.Trainer` on one device, under the same names."""

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
        """Whether the trainer is training."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self.state.stage = RunningStage.TRAINING if value else None

    @property
    def validating(self) -> bool:
        """Whether the trainer is validating."""
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self.state.stage = RunningStage.VALIDATING if value else None

    @property
    def testing(self) -> bool:
        """Whether the trainer is testing."""
        return self.state.stage is RunningStage.TESTING

    @property
    def evaluating(self) -> bool:
        """Whether the trainer is validating or testing."""
        return self.validating or self.testing

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended the run."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs."""
        return self.fit_loop.epochs_completed

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken."""
        return self.fit_loop.optimizer_steps

    @property
    def max_steps(self) -> int:
        """Number of optimizer steps to train for; -1 = unlimited."""
        return self.fit_loop.max_steps

    @property
    def max_epochs(self) -> int:
        """Number of epochs to train for; -1 = unlimited."""
        return self.fit_loop.max_epochs

    @property
    def min_epochs(self) -> int:
        """Minimum number of epochs."""
        return self.fit_loop.min_epochs

    @property
    def min_steps(self) -> None:
        """Minimum number of optimizer steps; always None."""
        return None

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the last batch of the epoch."""
        return self.fit_loop.is_last_batch

    @property
    def num_training_batches(self) -> int | float:
        """Number of batches per epoch; infinite until the loader is prepared."""
        return self.fit_loop.max_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Number of batches of a validation pass, in a list of one item."""
        return (
            [self.eval_loop.batches.length] if self.eval_loop is not None and self.eval_loop.batches is not None else []
        )

    @property
    def num_test_batches(self) -> list[int | float]:
        """Number of batches of a test pass, in a list of one item."""
        return self.num_val_batches if self.state.fn is TrainerFn.TESTING else []

    @property
    def enable_validation(self) -> bool:
        """Whether epochs end with a validation pass."""
        return self.eval_loop is not None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimizer steps that the fit will take; infinite without a limit of epochs or steps."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        self.fit_loop.setup_data()
        if self.num_training_batches == float("inf"):  # without a batch, as with a data set without a length
            return self.max_steps
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def log_step(self) -> int | None:
        """The step that `log_every_n_steps` is compared with; None outside the loops."""
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
        """The values last sent to the loggers."""
        return self._logger_connector.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values logged with `prog_bar=True`."""
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
        """The accelerator of the device."""
        return self.strategy.accelerator

    @property
    def device_ids(self) -> list[int]:
        """The index of the device, in a list of one item."""
        return [self.strategy.root_device.index or 0]

    @property
    def precision(self) -> str:
        """The precision, such as "32-true"."""
        return self.precision_plugin.precision

    @property
    def scaler(self) -> Any:
        """The gradient scaler of the precision "16-mixed", else None."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger."""
        if self.logger is None:
            return self.default_root_dir
        return self.logger.log_dir if isinstance(self.logger, (TensorBoardLogger, CSVLogger)) else self.logger.save_dir

    @property
    def train_dataloader(self) -> Any:
        """The training loader; None until it is prepared."""
        return self.fit_loop.batches and self.fit_loop.batches.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader; None until it is prepared."""
        return (
            None if self.eval_loop is None or self.testing else self.eval_loop.batches and self.eval_loop.batches.loader
        )

    @property
    def test_dataloaders(self) -> Any:
        """The test loader; None until it is prepared."""
        return self.eval_loop.batches and self.eval_loop.batches.loader if self.testing and self.eval_loop else None

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The :class:`EarlyStopping` callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first :class:`EarlyStopping` callback."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The :class:`Checkpoint` callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first :class:`Checkpoint` callback."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The first :class:`ProgressBar` callback."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on this rank; the arguments are those of the built-in `print`."""
        print(*args, **kwargs)
