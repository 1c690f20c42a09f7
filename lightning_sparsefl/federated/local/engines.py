"""Local engines: train and evaluate the clients of one rank in sequence, bit-equal to ``lightning.pytorch.Trainer``.

A Trainer is built to train one model for hours. A federation trains thousands of clients for seconds each, and the
setup of a Trainer would take most of that time. The fast engine keeps Lightning's order of hooks and arithmetic,
calls only the hooks that are overridden, and uses Lightning's own components wherever order or arithmetic could
differ. Some of these components are private, hence the pin ``lightning>=2.6,<2.7``. The test
`tests/contract/test_local_parity.py` compares both engines; run it first when Lightning's version changes. The
private names in use are:

- `_LoggerConnector`, `_ResultCollection`, `_ResultMetric`, `_Metadata`, `_Sync`: `self.log`, its reductions, and
  the values sent to the loggers;
- `_lightning_optimizers` and `_reset_optimizers_and_schedulers` of ``SingleDeviceStrategy``: manual optimization,
  and freeing the optimizers; its `setup_optimizers` handles the return types of `configure_optimizers`;
- `_ModuleMode`, `_parse_num_batches`, `_set_sampler_epoch`, `_auto_add_worker_init_fn`, `_log_hyperparams`,
  `_verify_dataloader_idx_requirement`, `_shutdown_workers_and_reset_iterator`: single steps of the loops;
- `_trainer`, `_current_fx_name`, `_metric_attributes`, `_param_requires_grad_state`, `_device` of a
  ``LightningModule``: attributes that a Trainer sets, and that must not pass from one client to the next;
- `_results`, `_logger_connector`, `_accelerator_connector`, `_batches_that_stepped`, `_should_accumulate`,
  `_should_check_val_epoch`: attributes of a trainer that Lightning's module, connector and callbacks read.

Modules and callbacks that the contract test does not cover train with a real Trainer
(:mod:`lightning_sparsefl.federated.local.lightning_trainer`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.fast.batch_scores import PartScore
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples
from lightning_sparsefl.federated.local.fast.divisible import Indivisible, check_divisible
from lightning_sparsefl.federated.local.fast.results import KnownCalls, discard
from lightning_sparsefl.federated.local.fast.support import (
    STEPS,
    overridden,
    require_automatic,
    unsupported_callback_reason,
    unsupported_hook_reason,
    unsupported_loader_reason,
    unsupported_reason,
)
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer, unsupported_fabric_reason
from lightning_sparsefl.federated.local.isolation import Settings, isolate_metrics, restore_trainer_refs
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions

_messages = WarningCache()
_TRAINER = "Clients train with a real Lightning Trainer, which is slower, because {}."
_STAGES = {"validate": RunningStage.VALIDATING, "test": RunningStage.TESTING}


def _require(reason: str | None) -> None:
    if reason is not None:
        raise InvalidOption(f"Clients cannot train: {reason}; set `federation.local_engine: trainer`.")


class _Evaluator(NamedTuple):
    """An evaluation that another one can follow."""

    trainer: FastTrainer
    stage: str

    def repeats(self, module: LightningModule, stage: str, callbacks: Sequence[Callback], datamodule: Any) -> bool:
        """Return whether another evaluation differs in its loader alone."""
        known = self.trainer.lightning_module is module and self.trainer.datamodule is datamodule
        return known and stage == self.stage and not callbacks and overridden(module) <= STEPS


class FastEngine:
    """Engine that trains clients in sequence, each with its own :class:`FastTrainer`, so that they share no state.

    Args:
        fabric: Fabric that determines the device and the precision.
        options: Options of local training.
        precision: Precision of the computation. Default: that of the Fabric.
        other: Engine for loaders that this one does not support, such as streams of unknown length. Default: they are
            refused.

    Raises:
        InvalidOption: If the engine does not support the precision or the device.
    """

    def __init__(
        self,
        fabric: Fabric,
        options: LocalOptions,
        precision: str | None = None,
        other: LightningEngine | None = None,
    ) -> None:
        self.fabric, self.options, self._other = fabric, options, other
        self.precision = precision or str(fabric.strategy.precision.precision)
        self.global_step = 0
        self._by_epochs: dict[int, LocalOptions] = {}
        """Options with other numbers of epochs, kept since checking them takes as long as a small model's step."""
        self._evaluator: _Evaluator | None = None
        """The newest evaluation, if further clients can be evaluated without a new set-up."""
        self._calls = KnownCalls()
        self.samples = DeviceSamples(fabric.device)
        _require(unsupported_fabric_reason(fabric))

    def for_epochs(self, epochs: int) -> FastEngine:
        """Return an engine with the same options except for the number of local epochs."""
        options = self._by_epochs.get(epochs)
        if options is None:
            options = self._by_epochs[epochs] = replace(self.options, max_epochs=epochs)
        engine = copy.copy(self)  # what is known of calls and samples is shared
        engine.options, engine.global_step, engine._evaluator = options, 0, None
        engine._other = self._other and self._other.for_epochs(epochs)
        return engine

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
        """Train one client as ``Trainer.fit`` does, and set `global_step` to the number of optimizer steps taken.

        Args:
            module: Module to train; changed in place, stays on its device.
            train_loader: Loader of the client's training batches.
            val_loader: Loader of validation batches, evaluated after each epoch. Default: no validation.
            callbacks: Callbacks of the client.
            loggers: Loggers for the client's metrics, indexed by the step within this fit.
            datamodule: Object that becomes `trainer.datamodule`; neither set up nor torn down here.

        Returns:
            The last value of each logged key, `trainer.callback_metrics`.

        Raises:
            InvalidOption: If the module or a loader needs a real Trainer, or the options do not fit the module.
        """
        other = self._other_for(train_loader, val_loader)
        if other is not None:
            try:
                return other.fit(
                    module, train_loader, val_loader, callbacks=callbacks, loggers=loggers, datamodule=datamodule
                )
            finally:
                self.global_step = other.global_step
        self._check_fit(module)
        trainer = self._client(module, callbacks, loggers, datamodule)
        with restore_trainer_refs(module, trainer.callbacks), trainer.running():
            try:
                return trainer.fit(train_loader, val_loader, self._calls.of(module))
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
        """Evaluate one client as ``Trainer.validate`` and ``Trainer.test`` do.

        Args:
            module: Module to evaluate; its weights, modes and buffers do not change.
            loader: Loader of labelled batches.
            stage: Stage to run: "validate" calls `validation_step`, "test" calls `test_step`.
            callbacks: Callbacks of the client.
            datamodule: Object that becomes `trainer.datamodule`.

        Returns:
            The value of each logged key, `trainer.callback_metrics`.

        Raises:
            InvalidOption: If the module or the loader needs a real Trainer, or the module does not define the step.
        """
        step = "validation_step" if stage == "validate" else "test_step"
        if step not in overridden(module):
            raise InvalidOption(f"`{type(module).__name__}` has no `{step}`; define it to {stage} (option `model`).")
        other = self._other_for(loader)
        if other is not None:
            return other.evaluate(module, loader, stage=stage, callbacks=callbacks, datamodule=datamodule)
        again = self._evaluator
        if again is not None and again.repeats(module, stage, callbacks, datamodule):
            trainer, evaluate = again.trainer, again.trainer.evaluate_again
        else:
            trainer = self._client(module, callbacks, datamodule=datamodule)
            evaluate = partial(trainer.evaluate, stage=_STAGES[stage])
        self._evaluator, settings = None, Settings.of_trainer(trainer)  # an error leaves no trainer behind
        with restore_trainer_refs(module, trainer.callbacks), trainer.running():
            metrics = {name: float(value) for name, value in evaluate(loader).items()}
        kept = settings.changed() is None  # what a step sets there must not reach the next client
        if kept and not callbacks and overridden(module) <= STEPS:
            self._evaluator = _Evaluator(trainer, stage)
        return metrics

    def evaluate_part(
        self,
        module: LightningModule,
        loader: Any,
        *,
        stage: Literal["validate", "test"],
        part: tuple[int, int],
        datamodule: Any = None,
    ) -> PartScore:
        """Evaluate one of several parts of a loader; all parts together make the result of :meth:`evaluate`.

        Args:
            module: Module to evaluate; its weights, modes and buffers do not change.
            loader: Loader of all labelled batches.
            stage: Stage to run: "validate" calls `validation_step`, "test" calls `test_step`.
            part: Number of this part, and number of all parts.
            datamodule: Object that becomes `trainer.datamodule`.
        """
        try:
            check_divisible(module, loader)
            trainer = self._client(module, datamodule=datamodule)
            settings = Settings.of_trainer(trainer)
            with restore_trainer_refs(module, trainer.callbacks), trainer.running():
                scores = trainer.evaluate_part(loader, _STAGES[stage], part)
            changed = settings.changed()
            if changed is not None:
                raise Indivisible(f"a step changes `{changed}`")
            return PartScore(scores)
        except Indivisible as reason:
            isolate_metrics(module)
            return PartScore(indivisible=str(reason))

    def gradient(self, module: LightningModule, batch: Any, batch_idx: int = 0, *, datamodule: Any = None) -> None:
        """Write the gradient of the training loss of one batch to `.grad`, replacing earlier gradients.

        Args:
            module: Module in the mode (training or evaluation) to use; its weights do not change.
            batch: Batch from the client's loader.
            batch_idx: Argument `batch_idx` of `training_step`.
            datamodule: Object that becomes `trainer.datamodule`.

        Raises:
            InvalidOption: If the module optimizes manually, so that a single training loss is not defined.
        """
        require_automatic(module)
        trainer = self._client(module, datamodule=datamodule)
        with restore_trainer_refs(module, ()), trainer.running(discard):
            trainer.gradient(batch, batch_idx)

    def _other_for(self, *loaders: Any) -> LightningEngine | None:
        """Return the other engine if it is needed for one of the loaders, with one message that gives the reason."""
        if self._other is None:
            return None
        reasons = (unsupported_loader_reason(loader) for loader in loaders if loader is not None)
        reason = next(filter(None, reasons), None)
        if reason is None:
            return None
        _messages.info(_TRAINER.format(reason))
        return self._other

    def _client(
        self,
        module: LightningModule,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        datamodule: Any = None,
    ) -> FastTrainer:
        _require(unsupported_hook_reason(module))
        return FastTrainer(
            self.options, self.fabric, module, callbacks, loggers, datamodule, self.precision, self.samples
        )

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
                    f"expected {off}, with the module itself doing this in `training_step`."
                )


def local_engine(
    name: Literal["auto", "fast", "trainer", "stacked"],
    fabric: Fabric,
    options: LocalOptions,
    module: LightningModule,
    callbacks: Sequence[Callback],
) -> FastEngine | LightningEngine:
    """Return the local engine of the clients that train alone.

    Args:
        name: Option `federation.local_engine`: "fast", "trainer", or "auto", which takes the fast engine where its
            results are known to equal those of a Trainer, and else a Trainer, with one message that gives the reason.
            "stacked" is as "auto" here: which clients are stacked is decided by
            :mod:`lightning_sparsefl.federated.local.choice`.
        fabric: Fabric that determines the device and the precision.
        options: Options of local training.
        module: Module of the user.
        callbacks: Callbacks that the clients train with.

    Raises:
        InvalidOption: If `name` is not one of the four.
    """
    if name not in ("auto", "fast", "trainer", "stacked"):
        raise InvalidOption(f"`federation.local_engine` is {name!r}; expected 'auto', 'fast', 'trainer' or 'stacked'.")
    if name == "fast":
        theirs = (callback for callback in callbacks if type(callback).__module__.startswith("lightning."))
        reason = unsupported_callback_reason(theirs)  # of its own callbacks a user may know more
        if reason is not None:
            _messages.warn(
                f"{reason[0].upper()}{reason[1:]}, whose results may differ from those with a Trainer; set "
                "`federation.local_engine: auto`."
            )
        return FastEngine(fabric, options)
    if name == "trainer":
        return LightningEngine(fabric, options)
    reason = unsupported_reason(module, callbacks) or unsupported_fabric_reason(fabric)
    if reason is None:
        return FastEngine(fabric, options, other=LightningEngine(fabric, options))
    _messages.info(_TRAINER.format(reason))
    return LightningEngine(fabric, options)
