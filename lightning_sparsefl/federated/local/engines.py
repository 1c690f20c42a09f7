"""The client loop: one rank's clients trained one after another, bit-equal to ``lightning.pytorch.Trainer``.

A Trainer is built to train one model for hours; a federation trains thousands of clients for seconds, and most
of that time would be the Trainer's. The fast loop keeps Lightning's order of hooks and arithmetic, but calls only
hooks that somebody overrides, and takes Lightning's own parts wherever order or arithmetic could differ. Those
have private names, hence the pin ``lightning>=2.6,<2.7``; `tests/contract/test_local_parity.py` compares the two,
and is the first thing to run under another version:

- `_LoggerConnector`, `_ResultCollection`, `_ResultMetric`, `_Metadata`, `_Sync`: `self.log`, its reductions, and
  what goes to the loggers;
- `_lightning_optimizers` and `_reset_optimizers_and_schedulers` of ``SingleDeviceStrategy``: manual optimization,
  and freeing the optimizers; its `setup_optimizers` knows the forms of `configure_optimizers`;
- `_ModuleMode`, `_parse_num_batches`, `_set_sampler_epoch`, `_auto_add_worker_init_fn`, `_log_hyperparams`,
  `_verify_dataloader_idx_requirement`, `_shutdown_workers_and_reset_iterator`: small steps of the loops;
- `_trainer`, `_current_fx_name`, `_metric_attributes`, `_param_requires_grad_state`, `_device` of a
  ``LightningModule``: what a Trainer leaves there, and what must not pass from one client to the next;
- `_results`, `_logger_connector`, `_accelerator_connector`, `_batches_that_stepped`, `_should_accumulate`,
  `_should_check_val_epoch`: what Lightning's module, connector and callbacks read of a trainer.

What the contract test does not cover trains with a real Trainer
(:mod:`lightning_sparsefl.federated.local.lightning_trainer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.fast_trainer import FastTrainer, unsupported
from lightning_sparsefl.federated.local.isolation import isolate_metrics, restore_trainer_refs
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.support import (
    overridden,
    require_automatic,
    unsupported_hook_reason,
    unsupported_reason,
)

__all__ = ["FastEngine", "LocalOptions", "isolate_metrics", "local_engine", "unsupported_reason"]

_messages = WarningCache()
_STAGES = {"validate": RunningStage.VALIDATING, "test": RunningStage.TESTING}


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """How every client trains; names and meaning are those of ``lightning.pytorch.Trainer``."""

    max_epochs: int = 1
    """Local epochs; -1 = no limit."""
    max_steps: int = -1
    """Optimizer steps; -1 = no limit."""
    gradient_clip_val: float | None = None
    """Where to clip gradients; None = not at all."""
    gradient_clip_algorithm: str | None = None
    """"norm" or "value"; None = "norm"."""
    accumulate_grad_batches: int = 1
    """Batches whose gradients make one optimizer step."""
    limit_train_batches: int | float = 1.0
    """Training batches of an epoch, as a number or a share."""
    limit_val_batches: int | float = 1.0
    """Validation batches, as a number or a share."""
    limit_test_batches: int | float = 1.0
    """Test batches, as a number or a share."""
    log_every_n_steps: int = 50
    """Steps between two rows of the loggers."""
    default_root_dir: str = "."
    """Where callbacks without a logger write."""

    def __post_init__(self) -> None:
        _check(self.max_epochs >= -1, "max_epochs", self.max_epochs, "a whole number >= -1")
        _check(self.max_steps >= -1, "max_steps", self.max_steps, "a whole number >= -1")
        _check(self.max_epochs != -1 or self.max_steps != -1, "max_epochs", -1, "a limit, here or as `max_steps`")
        batches, known = self.accumulate_grad_batches, (None, "norm", "value")
        _check(batches >= 1, "accumulate_grad_batches", batches, "a whole number >= 1")
        clip = self.gradient_clip_val
        _check(clip is None or clip >= 0, "gradient_clip_val", clip, "a number >= 0, or none")
        algorithm = self.gradient_clip_algorithm
        _check(algorithm in known, "gradient_clip_algorithm", algorithm, "'norm' or 'value'")
        for split in ("train", "val", "test"):
            limit = getattr(self, f"limit_{split}_batches")
            fits = limit >= 0 if isinstance(limit, int) else 0 <= limit <= 1
            _check(fits, f"limit_{split}_batches", limit, "a whole number >= 0 or a share in [0, 1]")


def _check(fits: bool, name: str, value: Any, expected: str) -> None:
    if not fits:
        raise InvalidOption(f"`trainer.{name}` is {value!r}; expected {expected}.")


def _require(reason: str | None) -> None:
    if reason is not None:
        raise InvalidOption(f"Clients cannot train: {reason}; set `federation.local_engine: trainer`.")


class FastEngine:
    """Trains client after client; each gets a trainer of its own, so nothing passes from one to the next.

    Args:
        fabric: Says on which device, and at which precision.
        options: How every client trains.

    Raises:
        InvalidOption: If the loop does not know the precision or the device.
    """

    def __init__(self, fabric: Fabric, options: LocalOptions) -> None:
        self.fabric, self.options = fabric, options
        self.global_step = 0
        _require(unsupported(fabric))

    def for_epochs(self, epochs: int) -> FastEngine:
        """The same, but for the number of local epochs."""
        return FastEngine(self.fabric, replace(self.options, max_epochs=epochs))

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
        """Train one client, as ``Trainer.fit`` does; `global_step` is the number of optimizer steps then.

        Args:
            module: Changed in place; stays on its device.
            train_loader: Of the client's batches.
            val_loader: Validated on after each epoch, if given.
            callbacks: The client's.
            loggers: Where its metrics go, in steps of this fit.
            datamodule: What the module finds as `trainer.datamodule`; not set up or torn down here.

        Returns:
            The last value of each logged key, `trainer.callback_metrics`.

        Raises:
            InvalidOption: If the module or loader needs a real Trainer, or the options do not fit the module.
        """
        self._check_fit(module)
        trainer = self._client(module, callbacks, loggers, datamodule)
        with restore_trainer_refs(module, trainer.callbacks), trainer.running():
            try:
                return trainer.fit(train_loader, val_loader)
            finally:
                self.global_step = trainer.global_step

    def evaluate(
        self,
        module: LightningModule,
        loader: Any,
        *,
        stage: Literal["validate", "test"],
        callbacks: Sequence[Callback] = (),
        datamodule: Any = None,
    ) -> dict[str, float]:
        """Score one client, as ``Trainer.validate`` and ``Trainer.test`` do.

        Args:
            module: Its weights, modes and buffers stay as they are.
            loader: Of labelled batches.
            stage: Decides between `validation_step` and `test_step`.
            callbacks: The client's.
            datamodule: What the module finds as `trainer.datamodule`.

        Returns:
            The value of each logged key, `trainer.callback_metrics`.

        Raises:
            InvalidOption: If the module or the loader needs a real Trainer, or the module has no such step.
        """
        step = "validation_step" if stage == "validate" else "test_step"
        if step not in overridden(module):
            raise InvalidOption(f"`{type(module).__name__}` has no `{step}`; define it to {stage} (option `model`).")
        trainer = self._client(module, callbacks, datamodule=datamodule)
        with restore_trainer_refs(module, trainer.callbacks), trainer.running():
            return {name: float(value) for name, value in trainer.evaluate(loader, _STAGES[stage]).items()}

    def gradient(self, module: LightningModule, batch: Any, batch_idx: int = 0) -> None:
        """Leave in `.grad` the gradient of the training loss of one batch; earlier gradients are dropped.

        Args:
            module: In the mode to use; its weights do not change.
            batch: From the client's loader.
            batch_idx: What `training_step` gets.

        Raises:
            InvalidOption: If the module optimizes manually, so that there is no one loss.
        """
        require_automatic(module)
        trainer = self._client(module)
        with restore_trainer_refs(module, ()), trainer.running():
            trainer.gradient(batch, batch_idx)

    def _client(
        self,
        module: LightningModule,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        datamodule: Any = None,
    ) -> FastTrainer:
        _require(unsupported_hook_reason(module))
        return FastTrainer(self.options, self.fabric, module, callbacks, loggers, datamodule)

    def _check_fit(self, module: LightningModule) -> None:
        name, options = type(module).__name__, self.options
        for hook in ("training_step", "configure_optimizers"):
            if hook not in overridden(module):
                raise InvalidOption(f"`{name}` has no `{hook}`; define it to train (option `model`).")
        if module.automatic_optimization:
            return
        for option, off in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
            if getattr(options, option) not in (off, 0):
                raise InvalidOption(
                    f"`trainer.{option}` is {getattr(options, option)}, but `{name}` optimizes manually; "
                    f"expected {off}, and the module to do it."
                )


def local_engine(
    name: Literal["auto", "fast", "trainer"],
    fabric: Fabric,
    options: LocalOptions,
    module: LightningModule,
    callbacks: Sequence[Callback],
) -> FastEngine | LightningEngine:
    """The client loop of a federation.

    Args:
        name: The fast loop, a real Trainer, or "auto": the fast one where it is known to train alike, else a
            Trainer, with one message that names the reason.
        fabric: Says on which device, and at which precision.
        options: How every client trains.
        module: The user's.
        callbacks: Those its clients train with.

    Raises:
        InvalidOption: If there is no such loop.
    """
    if name not in ("auto", "fast", "trainer"):
        raise InvalidOption(f"`federation.local_engine` is {name!r}; expected 'auto', 'fast' or 'trainer'.")
    if name == "fast":
        return FastEngine(fabric, options)
    if name == "trainer":
        return LightningEngine(fabric, options)
    reason = unsupported_reason(module, callbacks) or unsupported(fabric)
    if reason is None:
        return FastEngine(fabric, options)
    _messages.info(f"Clients train with a real Lightning Trainer, which is slower, because {reason}.")
    return LightningEngine(fabric, options)
