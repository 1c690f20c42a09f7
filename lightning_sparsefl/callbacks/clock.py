"""Where a fit stands, in optimizer steps, for callbacks whose options are shares of the training."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_sparsefl.errors import InvalidOption


class StepClock:
    """Counts the optimizer steps of one fit, also over a kill and a resume.

    A batch counts once, however many optimizers step in it; one that only accumulates gradients does not.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total = 1
        self._before = self._seen = 0
        self._resumed = False

    def start(self, trainer: Any, owner: str) -> bool:
        """Begin a fit, or go on with one.

        Args:
            trainer: Of the fit, its own counters restored.
            owner: The callback, to be named in a message.

        Returns:
            Whether the fit goes on from a checkpoint.

        Raises:
            InvalidOption: If the trainer does not know how many steps there will be.
        """
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self.step, self._before = 0, trainer.global_step  # not 0 where one trainer fits twice
        self._seen = trainer.global_step
        expected = trainer.estimated_stepping_batches
        if expected < 0 or math.isinf(expected):
            raise InvalidOption(
                f"`{owner}` plans in shares of the training, but nothing says how long that is; set "
                "`trainer.max_steps`, or `trainer.max_epochs` and a loader that has a length."
            )
        if _ends_without_steps(trainer):
            steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            expected = min(expected, steps * (trainer.max_epochs - 1))
        self.total = max(1, int(expected) - self._before)
        return resumed

    def tick(self, trainer: Any) -> bool:
        """At the end of a batch: whether an optimizer stepped in it."""
        stepped = bool(trainer.global_step != self._seen)
        self._seen = trainer.global_step
        self.step += stepped
        return stepped

    def stop(self) -> None:
        """The run is over, so what was loaded for it no longer matters."""
        self._resumed = False

    def state_dict(self) -> dict[str, int]:
        """What a resumed fit needs."""
        return {"step": self.step, "before": self._before}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on with the fit of a checkpoint."""
        self.step, self._before, self._resumed = state_dict["step"], state_dict["before"], True


def _ends_without_steps(trainer: Any) -> bool:
    """Whether stochastic weight averaging has added an epoch to the fit, only to renew the statistics of batch norm."""
    if not any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        return False
    return trainer.max_epochs > 1 and StochasticWeightAveraging.pl_module_contains_batch_norm(trainer.lightning_module)
