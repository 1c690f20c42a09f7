"""Pruning during training with weights that may return.

Lin et al., "Dynamic model pruning with feedback", ICLR 2020, arXiv:2006.07253, algorithm 1.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.options import (
    check_arguments,
    require_density,
    require_interval,
    require_one_each,
    require_window,
    too_dense,
    window,
)
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import dense_like, density, kept
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.schedule import gradual
from lightning_sparsefl.sparse.scores import magnitude


class DynamicPruningWithFeedback(ErrorFeedback):
    """Trains dense weights by the gradients of the pruned ones: ``w <- w - lr * grad f(w * m)`` (DPF).

    :class:`~lightning_sparsefl.callbacks.feedback.ErrorFeedback` says where the dense weights are. Every few steps the
    mask is taken anew from the magnitudes of all dense weights together, so that a weight that has grown while it was
    pruned returns.

    The density falls as in :class:`GradualPruning`; a second `fit` starts from the density, the mask and the dense
    weights that the first one reached.

    Args:
        density: Fraction of the layers' weights that is left in the end, in (0, 1].
        start: Share of the training before pruning starts, in [0, 1).
        end: Share of the training at which the density is reached, in (start, 1]; masks move until the end.
        every_n_steps: Optimizer steps between two masks; there is one at `end` in any case.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, the length of the training is unknown, or the optimizer is LBFGS.

    Example:
        >>> DynamicPruningWithFeedback(density=0.1).every_n_steps
        16
    """

    stackable = True

    @check_arguments
    def __init__(
        self,
        density: float = 0.2,
        start: float = 0.0,
        end: float = 0.5,
        every_n_steps: int = 16,
        layers: list[str] | str | None = None,
    ) -> None:
        require_density("DynamicPruningWithFeedback", density)
        require_window("DynamicPruningWithFeedback", start, end)
        require_interval("DynamicPruningWithFeedback", every_n_steps)
        super().__init__(layers)
        self.density, self.start, self.end, self.every_n_steps = density, start, end, every_n_steps
        self._clock = StepClock()
        self._initial, self._reached = 1.0, False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the masks, and guard the optimizers' steps."""
        self._clock.start(trainer, "DynamicPruningWithFeedback", self.resumed)
        if not self.resumed:
            self._initial, self._reached = density(self.masks), False
        require_one_each("DynamicPruningWithFeedback", "density", self.density, self._goal(), self._weights)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Prune the weights, and take a new mask if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._clock.tick(trainer) and self._due():
            self._remask()

    @property
    def _window(self) -> tuple[int, int]:
        """The steps between which the density falls."""
        return window(self.start, self.end, self._clock.total)

    def _goal(self) -> int:
        """Return how many weights are left in the end."""
        return max(1, floor_count(self.density, sum(mask.numel() for mask in self.masks.values())))

    def _due(self) -> bool:
        step, (first, last) = self._clock.step, self._window
        late = step >= last and not self._reached
        return late or (step >= first and (step - first) % self.every_n_steps == 0)

    def shortfall(self) -> str | None:
        """Return the density at which pruning stands, if it is above that which was asked for."""
        return too_dense(self.masks, self._goal(), self._clock)

    def _remask(self) -> None:
        self._reached = self._clock.step >= self._window[1]
        self._join(self._weights)
        everything = dense_like(self._weights)
        share = gradual(self._initial, self.density, self._clock.step, *self._window)
        count = min(kept(self.masks), max(1, floor_count(share, kept(everything))))
        self.adopt(shrink_globally(magnitude(self._weights), everything, count))
        self._part()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, the pruned part of the dense weights, and the state of the schedule."""
        plan = {"clock": self._clock.state_dict(), "initial": self._initial, "reached": self._reached}
        return super().state_dict() | plan

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks, the dense weights and the schedule of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._initial, self._reached = state_dict["initial"], state_dict["reached"]
