"""Position of a fit in optimizer steps, for callbacks whose options are shares of the training."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from lightning_sparsefl.errors import InvalidOption


class StepClock:
    """Counter of the optimizer steps of one fit, kept across a kill and a resume.

    The unit is a batch in which at least one optimizer steps: a batch counts once, however many optimizers step in
    it, and a batch that only accumulates gradients does not count. `step` and `total` are in this unit.

    With automatic optimization `total` is exact from the start. With manual optimization the module decides how often
    it steps, so that `total` is estimated anew after every step from the share of the training that is done, which is
    measured in what ends the fit: `max_steps` or `max_epochs`. It then changes as the rate of steps changes, and is
    exact when the fit ends.

    A callback calls :meth:`start` in `on_train_start` and :meth:`tick` in `on_train_batch_end`, and includes the state
    in its own `state_dict`.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total = 1
        self._batches = 0
        self._steps_before = self._epochs_before = self._seen = 0

    def start(self, trainer: Any, owner: str, resumed: bool = False) -> None:
        """Start counting the steps of a fit, or continue where a checkpoint was saved.

        Args:
            trainer: Trainer of the fit, its own counters restored.
            owner: Name of the callback, for the error message.
            resumed: Whether the fit goes on from a checkpoint, whose state has been loaded.

        Raises:
            InvalidOption: If the trainer does not know how many steps there will be.
        """
        if not resumed:  # a trainer that fits twice does not begin at 0
            self.step, self._batches = 0, 0
            self._steps_before, self._epochs_before = trainer.global_step, trainer.current_epoch
        self._seen = trainer.global_step
        expected = trainer.estimated_stepping_batches
        if expected < 0 or math.isinf(expected):
            raise InvalidOption(
                f"`{owner}` plans in shares of the training, but the length of the training is unknown; set "
                "`trainer.max_steps`, or `trainer.max_epochs` and a loader that has a length."
            )
        if trainer.lightning_module.automatic_optimization:
            self.total = max(1, _automatic_steps(trainer) - self._steps_before)
        else:
            self.total = max(1, int(expected) - self._steps_before)
            self._estimate(trainer)

    @property
    def unreported(self) -> bool:
        """Whether batches have ended, but Lightning knows of no step in them."""
        return self._batches > 0 and self.step == 0

    @property
    def reason(self) -> str:
        """Clause that says why no step was counted; empty if one was."""
        return ", since Lightning reports no steps of `optimizers(use_pl_optimizer=False)`" if self.unreported else ""

    def tick(self, trainer: Any) -> bool:
        """Count a batch that has ended, and return whether an optimizer stepped in it."""
        self._batches += 1
        stepped = bool(trainer.global_step != self._seen)
        self._seen = trainer.global_step
        self.step += stepped
        if stepped and not trainer.lightning_module.automatic_optimization:
            self._estimate(trainer)
        return stepped

    def _estimate(self, trainer: Any) -> None:
        """Set `total` by the share of the training that the steps so far have taken."""
        shares = []
        if trainer.max_steps != -1:
            shares.append((trainer.global_step - self._steps_before, trainer.max_steps - self._steps_before))
        if trainer.max_epochs != -1 and not math.isinf(trainer.num_training_batches):
            epochs = trainer.max_epochs - self._epochs_before
            shares.append((self._batches, trainer.num_training_batches * epochs))
        done = max((part / whole for part, whole in shares if whole > 0), default=0.0)
        if self.step and done > 0:
            self.total = max(self.step, round(self.step / min(1.0, done)))

    def state_dict(self) -> dict[str, int]:
        """Return the counters that a resumed fit needs, and the total, which it determines anew."""
        before = {"steps_before": self._steps_before, "epochs_before": self._epochs_before}
        return {"step": self.step, "total": self.total, "batches": self._batches} | before

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the counters of a checkpoint."""
        self.step, self.total, self._batches = state_dict["step"], state_dict["total"], state_dict["batches"]
        self._steps_before, self._epochs_before = state_dict["steps_before"], state_dict["epochs_before"]


def _automatic_steps(trainer: Any) -> int:
    """Return how many steps all epochs of a trainer take under automatic optimization."""
    if trainer.max_epochs == -1 or math.isinf(trainer.num_training_batches):
        return int(trainer.max_steps)
    epochs = max(trainer.max_epochs, 1) - _ends_without_steps(trainer)
    steps = sum(math.ceil(trainer.num_training_batches / _accumulation(trainer, epoch)) for epoch in range(epochs))
    return int(steps) if trainer.max_steps == -1 else min(steps, int(trainer.max_steps))


def _accumulation(trainer: Any, epoch: int) -> int:
    """Return over how many batches gradients are accumulated in an epoch."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return int(callback.get_accumulate_grad_batches(epoch))
    return int(trainer.accumulate_grad_batches)


def _ends_without_steps(trainer: Any) -> bool:
    """Return whether stochastic weight averaging has added an epoch only to renew the statistics of batch norm."""
    if not any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        return False
    return trainer.max_epochs > 1 and StochasticWeightAveraging.pl_module_contains_batch_norm(trainer.lightning_module)
