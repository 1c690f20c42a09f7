"""Optimizer steps that Lightning reports to callbacks, and the refusal of those that it does not."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.holding import HoldingCallback
from lightning_sparsefl.callbacks.step_guard import StepGuard
from lightning_sparsefl.errors import InvalidOption


class ReportedSteps:
    """Refusal of optimizer steps that Lightning does not report to callbacks, in manual optimization.

    A step of the bare optimizer, from ``self.optimizers(use_pl_optimizer=False)``, calls no
    ``on_before_optimizer_step``, so that what a callback does there would silently be left out.

    Args:
        owner: Class of the callback, for the error message.
    """

    def __init__(self, owner: str) -> None:
        self._owner, self._module = owner, ""
        self._guards: list[StepGuard] = []
        self._reported = False

    def watch(self, trainer: Any, module: Any) -> None:
        """Watch the steps of a fit that optimizes manually.

        Args:
            trainer: Trainer of the fit, whose optimizers are set up.
            module: Module that is trained.
        """
        self.release()
        if not module.automatic_optimization:
            self._module = type(module).__name__
            self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers]

    def report(self) -> None:
        """Note that the step that is due was reported."""
        self._reported = True

    def before_loss(self, again: bool) -> None:
        """Do nothing, since Lightning reports a step after the loss."""

    def before_update(self, optimizer: Any) -> None:
        """Refuse a step that was not reported."""
        if not self._reported:
            raise InvalidOption(
                f"`{self._owner}`: `{self._module}.training_step` steps a bare optimizer, which Lightning does not "
                "report to callbacks; expected `self.optimizers()`, without `use_pl_optimizer=False`."
            )

    def after_step(self, optimizer: Any) -> None:
        """Wait for the report of the next step."""
        self._reported = False

    def release(self) -> None:
        """Stop watching."""
        for guard in self._guards:
            guard.remove()
        self._guards, self._reported = [], False


class ReportedCallback(HoldingCallback):
    """Base class of callbacks that act before each optimizer step, and refuse steps that are not reported to them."""

    def __init__(self) -> None:
        self._reports = ReportedSteps(type(self).__name__)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Watch the steps of the module's optimizers."""
        self._reports.watch(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that the step is reported."""
        self._reports.report()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the module and its optimizers."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release them also where the run failed, since Lightning calls no teardown then."""
        self._release()

    def _release(self) -> None:
        self._reports.release()
