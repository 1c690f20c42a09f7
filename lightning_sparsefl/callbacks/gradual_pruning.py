"""Prune little by little while training.

Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017,
arXiv:1710.01878, eq. 1.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import require, require_density, require_interval, require_window
from lightning_sparsefl.sparse.density import ceil_count, floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink, shrink_globally
from lightning_sparsefl.sparse.schedule import gradual, recurs
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks


class GradualPruning(MaskingCallback):
    """Drops the smallest weights every few steps, so that the density falls by a cubic to its end.

    At step t of the window from s to e the density is ``d + (d_0 - d) * (1 - (t - s) / (e - s)) ** 3``; it is
    reached at e, and held from there on. What was dropped stays so. A second `fit` starts from the density that the
    first one reached: after a whole one there is nothing left to do but to hold the masks.

    Args:
        density: Fraction of the layers' weights that is left in the end, in (0, 1].
        start: Share of the training before pruning starts, in [0, 1).
        end: Share of the training at which the density is reached, in (start, 1].
        every_n_steps: Optimizer steps between two prunings; the last one is at `end` in any case.
        scope: "layer" keeps the same density in each layer, ``max(1, floor(density * weights))``; "global" ranks the
            weights of all layers together.
        layers: Patterns of layer names, such as ``["*conv*", "!head*"]``; None = all tensors of two or more
            dimensions.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, or the length of the training is unknown.

    Example:
        >>> GradualPruning(density=0.1, end=0.8).end
        0.8
    """

    def __init__(
        self,
        density: float = 0.2,
        start: float = 0.0,
        end: float = 0.5,
        every_n_steps: int = 100,
        scope: Literal["layer", "global"] = "layer",
        layers: list[str] | str | None = None,
    ) -> None:
        require_density("GradualPruning", density)
        require_window("GradualPruning", start, end)
        require_interval("GradualPruning", every_n_steps)
        require(scope in ("layer", "global"), "GradualPruning", "scope", scope, "'layer' or 'global'")
        super().__init__(layers)
        self.density, self.start, self.end, self.every_n_steps = density, start, end, every_n_steps
        self.scope = scope
        self._clock = StepClock()
        self._window = (0, 1)
        self._initial: dict[str, int] = {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the prunings."""
        if not self._clock.start(trainer, "GradualPruning"):
            self._initial = counts(self.masks)
        first = floor_count(self.start, self._clock.total)
        self._window = (first, max(first + 1, ceil_count(self.end, self._clock.total)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, and prune if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._clock.tick(trainer) and recurs(self._clock.step, *self._window, self.every_n_steps):
            self.hold(self._pruned())
            self.forget(trainer.optimizers, self.masks)

    def _pruned(self) -> Masks:
        score, now = magnitude(self._weights), counts(self.masks)
        sizes = {name: mask.numel() for name, mask in self.masks.items()}
        if self.scope == "layer":
            return shrink(score, self.masks, {n: self._left(self._initial[n], now[n], sizes[n]) for n in now})
        left = self._left(sum(self._initial.values()), sum(now.values()), sum(sizes.values()))
        return shrink_globally(score, self.masks, left)

    def _left(self, initial: int, now: int, size: int) -> int:
        """How many of `size` weights are kept at this step; never more than now."""
        share = gradual(initial / max(1, size), self.density, self._clock.step, *self._window)
        return min(now, max(1, floor_count(share, size)))

    def release(self) -> None:
        """Let go of the module's tensors."""
        super().release()
        self._clock.stop()

    def state_dict(self) -> dict[str, Any]:
        """The masks, one bit a weight, and where the schedule stands."""
        return super().state_dict() | {"clock": self._clock.state_dict(), "initial": dict(self._initial)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the masks and the schedule of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._initial = dict(state_dict["initial"])
