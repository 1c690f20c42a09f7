"""The trainer that a module sees in a stack, and what it requires of the user's optimizer and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import ELEMENTWISE
from lightning_sparsefl.federated.local.stacked.logs import NotStackable


class StackTrainer(FastTrainer):
    """Trainer that a module sees in a stack; the arguments are those of :class:`FastTrainer`.

    Attributes:
        steps: Whether a step or a scheduler runs, which cannot have the logged values of one client.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.steps = False
        super().__init__(*args, **options)

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Refuse to read logged values within the context, in which code of the module runs for all clients."""
        self.steps = True
        try:
            yield
        finally:
            self.steps = False

    def _require_no_step(self, name: str) -> None:
        if self.steps:
            raise NotStackable(f"asks for `trainer.{name}`, of which each client has its own")

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of each logged key.

        Raises:
            NotStackable: Within a step, as for the values of loggers and of the progress bar.
        """
        self._require_no_step("callback_metrics")
        return super().callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values last sent to the loggers."""
        self._require_no_step("logged_metrics")
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values logged with `prog_bar=True`."""
        self._require_no_step("progress_bar_metrics")
        return super().progress_bar_metrics


def require_elementwise(trainer: Any) -> None:
    """Raise :class:`NotStackable` unless the optimizer treats all numbers alike, and the schedulers all clients.

    Args:
        trainer: Trainer whose optimizers are set up.
    """
    if len(trainer.optimizers) != 1 or type(trainer.optimizers[0]) not in ELEMENTWISE:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
        raise NotStackable(f"is followed by the optimizer {kinds}, which is not known to treat all weights alike")
    optimizer = trainer.optimizers[0]
    patched = vars(optimizer).get("step")
    if (patched is not None and not hasattr(patched, "_wrapped_by_lr_sched")) or (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        raise NotStackable("is followed by an optimizer with hooks or with another `step` of its own")
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise NotStackable("is followed by a ReduceLROnPlateau, which gives each client another learning rate")
