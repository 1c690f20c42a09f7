"""The trainer object that round-level callbacks receive, in which an epoch is a round and a batch is a client.

Lightning's own ModelCheckpoint, EarlyStopping, progress bars and loggers work with it without changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, MissingAttribute, nearest
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.checkpoint import LAST, PREVIOUS
from lightning_sparsefl.federated.storage.initial_weights import INITIAL
from lightning_sparsefl.federated.tracking.tags import scores_first

_SHOWN = 10
"""Maximum number of metrics that a message lists."""


class _ProcessStrategy:
    """Fabric's strategy with two methods that only the strategies of Lightning's Trainer have."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._fabric.strategy, name)
        except AttributeError as error:
            raise _missing(f"strategy.{name}") from error

    def remove_checkpoint(self, path: str) -> None:
        if self._fabric.is_global_zero:
            Path(path).unlink(missing_ok=True)

    def reduce(self, tensor: Any, *_: Any, reduce_op: str = "mean", **__: Any) -> Any:
        return self._fabric.strategy.all_reduce(tensor, reduce_op=reduce_op)


class RoundTrainer:
    """The round-level view of a federated fit.

    Args:
        fabric: Fabric that is already launched.
        module: Module of the user.
        callbacks: Round-level callbacks.
        loggers: Loggers of the run.
        log_dir: Path of the run folder.
        max_rounds: Number of rounds of the run.
        clients_per_round: Number of clients in a round.
        check_val_every_n_round: Number of rounds between two evaluations.
        compose_checkpoint: Function that returns the content of a self-contained checkpoint; its argument says
            whether to include the state of the federation.
    """

    sanity_checking = fast_dev_run = barebones = received_sigterm = False
    enable_validation = True
    ckpt_path = None
    training = True
    validating = testing = predicting = False
    max_steps = -1
    val_check_interval = 1.0
    val_check_batch = None
    num_sanity_val_batches: Sequence[int] = ()
    datamodule: Any = None

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
        log_dir: str,
        max_rounds: int,
        clients_per_round: int,
        check_val_every_n_round: int,
        compose_checkpoint: Callable[[bool], Mapping[str, Any]],
    ) -> None:
        self.fabric, self.lightning_module, self.model = fabric, module, module
        self.callbacks, self.loggers = list(callbacks), list(loggers)
        self.log_dir, self.default_root_dir = log_dir, log_dir
        self.max_epochs, self.num_training_batches, self.num_val_batches = max_rounds, clients_per_round, [1]
        self.check_val_every_n_epoch = check_val_every_n_round
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = _ProcessStrategy(fabric)
        self.state = TrainerState(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING, stage=RunningStage.TRAINING)
        self.callback_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.current_epoch = self.global_step = 0
        self.should_stop, self._stopped_by = False, ""
        epoch_loop = SimpleNamespace(
            val_loop=SimpleNamespace(_has_run=True),
            batch_progress=SimpleNamespace(is_last_batch=False),
            _should_check_val_epoch=lambda: True,
        )
        self.fit_loop = SimpleNamespace(epoch_loop=epoch_loop, max_epochs=max_rounds, total_batch_idx=0)
        self._compose_checkpoint = compose_checkpoint

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self.fabric.is_global_zero

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.fabric.world_size

    @property
    def global_rank(self) -> int:
        """Index of this rank."""
        return self.fabric.global_rank

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if hasattr(callback, "best_model_path")]

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar, or None."""
        return next((c for c in self.callbacks if hasattr(c, "get_metrics")), None)

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every round-level callback.

        Args:
            hook: Name of the hook.
            *args: Arguments that follow the trainer and the module.

        Raises:
            InvalidOption: If a callback monitors a metric that the round does not have.
        """
        for callback in self.callbacks:
            self._call(callback, hook, *args)

    @property
    def stopped_by(self) -> str:
        """State key of the callback that asked for no more rounds; empty if none did."""
        return self._stopped_by if self.should_stop else ""

    @stopped_by.setter
    def stopped_by(self, key: str) -> None:
        self.should_stop, self._stopped_by = bool(key), key

    def _call(self, callback: Callback, hook: str, *args: Any) -> None:
        goes_on = not self.should_stop
        try:
            getattr(callback, hook)(self, self.lightning_module, *args)
        except (MisconfigurationException, RuntimeError) as error:
            self._require_monitored(callback, error)
            raise
        if goes_on and self.should_stop:
            self._stopped_by = callback.state_key

    def _require_monitored(self, callback: Callback, error: Exception) -> None:
        """Raise :class:`InvalidOption` if a callback failed and monitors a metric that the round does not have."""
        name, known = getattr(callback, "monitor", None), scores_first(self.callback_metrics)
        if isinstance(name, str) and name not in known and name in str(error):
            near = nearest(name, known)
            expected = self._first_of(known) if near is None else f"a metric of the round, such as {near!r}"
            raise InvalidOption(f"`{type(callback).__name__}.monitor` is {name!r}; expected {expected}.") from error

    def _first_of(self, known: Sequence[str]) -> str:
        """Return the first metrics for a message, and where the others are."""
        shown, more = f"one of {', '.join(known[:_SHOWN])}", len(known) - _SHOWN
        return f"{shown}, or another column of {Path(self.log_dir) / 'metrics.csv'}" if more > 0 else shown

    def report(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to `callback_metrics`.

        Args:
            metrics: Values by name.
        """
        self.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = False, storage_options: Any = None
    ) -> None:
        """Write a self-contained checkpoint, which includes the records of the clients.

        The engine's own `last.ckpt` is never written here, since it must always be the last committed round.

        Args:
            filepath: Path of the checkpoint.
            weights_only: Whether to omit the state of the federation.
            storage_options: Ignored; accepted as in Lightning's `Trainer`.

        Raises:
            InvalidOption: If the run has a file of its own there.
        """
        own = Path(self.log_dir).resolve() / "checkpoints"
        path = Path(filepath).resolve()
        if path == own / LAST:
            return
        if path in (own / PREVIOUS, own / INITIAL):
            raise InvalidOption(
                f"`ModelCheckpoint.filename` is {path.stem!r} in {own}, where the run has a file of this name; "
                "expected another name, or another `dirpath`."
            )
        content = dict(self._compose_checkpoint(not weights_only))
        if weights_only:
            content.pop("sparsefl")
        if self.is_global_zero:
            write_atomically(Path(filepath), content)
        self.fabric.barrier()

    def __getattr__(self, name: str) -> Any:
        raise _missing(name)


def _missing(name: str) -> MissingAttribute:
    """Return the exception for an attribute that a callback reads."""
    return MissingAttribute(
        f"The round-level trainer has no attribute {name!r}; pass a callback that needs it as one of the clients' "
        "(`trainer.client_callbacks`)."
    )
