"""Gradual pruning during training.

Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017,
arXiv:1710.01878, eq. 1.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import (
    LayerDensity,
    check_arguments,
    require,
    require_density,
    require_interval,
    require_layer_density,
    require_one_each,
    require_window,
    spread,
    too_dense,
    window,
)
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import floor_count, kept_counts
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink, shrink_globally
from lightning_sparsefl.sparse.schedule import gradual, recurs
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks


class GradualPruning(MaskingCallback):
    """Drops the smallest weights every few steps, so that the density falls by a cubic to its end.

    At step t of the window from s to e the density is ``d + (d_0 - d) * (1 - (t - s) / (e - s)) ** 3``; it is
    reached at e, and held from there on. What was dropped stays so. A second `fit` starts from the density that the
    first one reached: after a whole one there is nothing left to do but to hold the masks, and a larger density is
    refused.

    Args:
        density: Fraction of the layers' weights that is left in the end, in (0, 1].
        start: Share of the training before pruning starts, in [0, 1).
        end: Share of the training at which the density is reached, in (start, 1].
        every_n_steps: Optimizer steps between two prunings; the last one is at `end` in any case.
        scope: "layer" ranks the weights of each layer, and leaves ``max(1, floor(density * weights))`` of them;
            "global" ranks those of all layers together. At low densities an equal share leaves small layers, such as
            a head, few weights; "global" and `layer_density` "erk" leave them more.
        layer_density: Density, with the scope "layer", at the end of each layer: the same, by the
            Erdos-Renyi-Kernel rule, or by name pattern, as in ``{"*conv*": 0.5, "head*": 1.0}``, where layers that
            match none have `density`.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, a layer cannot reach its density, or the length of the training is unknown.

    Example:
        >>> GradualPruning(density=0.1, end=0.8).end
        0.8
    """

    stackable = True

    @check_arguments
    def __init__(
        self,
        density: float = 0.2,
        start: float = 0.0,
        end: float = 0.5,
        every_n_steps: int = 100,
        scope: Literal["layer", "global"] = "layer",
        layer_density: LayerDensity = "uniform",
        layers: list[str] | str | None = None,
    ) -> None:
        require_density("GradualPruning", density)
        require_window("GradualPruning", start, end)
        require_interval("GradualPruning", every_n_steps)
        require(scope in ("layer", "global"), "GradualPruning", "scope", scope, "'layer' or 'global'")
        require_layer_density("GradualPruning", layer_density)
        even = scope == "layer" or layer_density == "uniform"
        require(even, "GradualPruning", "layer_density", layer_density, "'uniform' with `scope='global'`")
        super().__init__(layers)
        self.density, self.start, self.end, self.every_n_steps = density, start, end, every_n_steps
        self.scope, self.layer_density = scope, layer_density
        self._clock = StepClock()
        self._initial: dict[str, int] = {}
        self._reached = False
        self._final: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the prunings."""
        super().on_train_start(trainer, pl_module)
        self._clock.start(trainer, "GradualPruning", self.resumed)
        if not self.resumed:
            self._initial, self._reached = counts(self.masks), False
        now, last = counts(self.masks), self._last_counts()
        if self.scope == "global":
            now = {"all layers": sum(now.values())}
        for name, count in last.items():
            if count > now[name]:
                raise InvalidOption(
                    f"`GradualPruning(density={self.density})`: `{name}` has {now[name]} weights left, fewer than the "
                    f"{count} that it should end with, and what was dropped stays so; expected a lower density."
                )

    def _last_counts(self) -> dict[str, int]:
        """Return how many weights are kept in the end, of each layer or of all together."""
        if self.scope == "layer":
            self._final = spread("GradualPruning", self.masks, self.density, self.layer_density)
            return kept_counts(self.masks, self._final)
        count = floor_count(self.density, sum(mask.numel() for mask in self.masks.values()))
        require_one_each("GradualPruning", "density", self.density, count, self.masks)
        return {"all layers": count}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, and prune if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._clock.tick(trainer) and self._due():
            self._reached = self._clock.step >= self._window[1]
            self.hold(self._pruned())

    @property
    def _window(self) -> tuple[int, int]:
        """The steps between which the density falls."""
        return window(self.start, self.end, self._clock.total)

    def _due(self) -> bool:
        """Return whether to prune at this step; once when the end is reached, which a new estimate may have moved."""
        step, (first, last) = self._clock.step, self._window
        return not self._reached and (step >= last or recurs(step, first, last, self.every_n_steps))

    def shortfall(self) -> str | None:
        """Return the density at which pruning stands, if it is above that which was asked for."""
        return too_dense(self.masks, sum(self._last_counts().values()), self._clock)

    def _pruned(self) -> Masks:
        score, now = magnitude(self._weights), counts(self.masks)
        sizes = {name: mask.numel() for name, mask in self.masks.items()}
        if self.scope == "layer":
            left = {n: self._left(self._final[n], self._initial[n], now[n], sizes[n]) for n in now}
            return shrink(score, self.masks, left)
        together = self._left(self.density, sum(self._initial.values()), sum(now.values()), sum(sizes.values()))
        return shrink_globally(score, self.masks, together)

    def _left(self, final: float, initial: int, now: int, size: int) -> int:
        """Return how many of `size` weights are kept at this step; never more than now."""
        share = gradual(initial / max(1, size), final, self._clock.step, *self._window)
        return min(now, max(1, floor_count(share, size)))

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and the state of the schedule."""
        plan = {"clock": self._clock.state_dict(), "initial": dict(self._initial), "reached": self._reached}
        return super().state_dict() | plan

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks and the schedule of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._initial, self._reached = dict(state_dict["initial"]), state_dict["reached"]
