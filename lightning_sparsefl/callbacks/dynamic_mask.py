"""Training under a mask that moves.

SET: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired by
network science", Nature Communications 2018. RigL: Evci et al., "Rigging the lottery: making all tickets winners",
ICML 2020, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import (
    LayerDensity,
    check_arguments,
    drawn,
    require,
    require_density,
    require_interval,
    require_layer_density,
    rescale_first_weights,
    rescales,
)
from lightning_sparsefl.callbacks.step_guard import refuse_lbfgs
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse import scores
from lightning_sparsefl.sparse.density import ceil_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import prune
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.types import Masks, Weights

_warnings = WarningCache()


class DynamicMask(MaskingCallback):
    """Drops small weights and grows others in their place, every few steps; no layer's density ever changes.

    With ``growth="gradient"`` it is RigL: the weights with the largest gradients grow, by the gradient of the step
    at which the mask moves, which is dense since only weights are zeroed. With ``growth="random"`` it is SET. At step
    t a layer drops ``ceil(fraction / 2 * (1 + cos(pi * t / t_stop)) * kept)`` of its weights. A weight that grows
    starts at zero (in SET's own paper at random, in RigL's comparison at zero), and so does its state in the
    optimizers.

    Unlike in the papers' code the optimizer takes its step also where the mask moves, under the new mask. Where
    mixed precision skips a step for gradients that are not finite, the move waits for the next one. Put
    callbacks that write gradients before this one. A second `fit` goes on with the masks of the first and starts
    the schedule again; one that is resumed keeps the checkpoint's masks, and warns of options for others.

    Args:
        density: Fraction of the layers' weights to keep, in (0, 1]; the first mask is drawn when training starts.
        layer_density: How the density is spread over layers: by the Erdos-Renyi-Kernel rule, evenly, or by name
            pattern, as in ``{"*conv*": 0.5, "head*": 1.0}``, where layers that match none have `density`.
        growth: "gradient" (RigL) or "random" (SET).
        fraction: Fraction of a layer's kept weights that the first move exchanges, in [0, 1]; it decays to zero by a
            half cosine.
        every_n_steps: Optimizer steps between two moves.
        stop: Share of the training after which the mask stays, in (0, 1].
        seed: Seed of the first mask and of random growth.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.
        rescale: Whether to multiply the first weights of each output by the root of its fan-in over the kept part of
            it, so that sparse signals do not fade; None = only in modules without normalization layers. In a
            federation only weights that the run starts with are rescaled.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, or trains them as powers that stay at 0, the length of the training is unknown, or the optimizer
            is LBFGS.

    Example:
        >>> DynamicMask(density=0.1, growth="random", fraction=0.5).growth
        'random'
    """

    stackable = True
    grows_from_zero = True

    @check_arguments
    def __init__(
        self,
        density: float = 0.2,
        layer_density: LayerDensity = "erk",
        growth: Literal["gradient", "random"] = "gradient",
        fraction: float = 0.3,
        every_n_steps: int = 100,
        stop: float = 0.75,
        seed: int = 0,
        layers: list[str] | str | None = None,
        rescale: bool | None = None,
    ) -> None:
        require_density("DynamicMask", density)
        require_layer_density("DynamicMask", layer_density)
        require(growth in ("gradient", "random"), "DynamicMask", "growth", growth, "'gradient' or 'random'")
        require(0 <= fraction <= 1, "DynamicMask", "fraction", fraction, "a number in [0, 1]")
        require_interval("DynamicMask", every_n_steps)
        require(0 < stop <= 1, "DynamicMask", "stop", stop, "a share of the training in (0, 1]")
        super().__init__(layers)
        self.density, self.layer_density, self.growth, self.fraction = density, layer_density, growth, fraction
        self.every_n_steps, self.stop, self.seed, self.rescale = every_n_steps, stop, seed, rescale
        self._clock = StepClock()
        self._due: list[str] = []
        self._draws = 0

    def draw_options(self) -> dict[str, Any]:
        """Return the densities and the seed."""
        return {"density": self.density, "layer_density": self.layer_density, "seed": self.seed}

    def first_weights(self, weights: Weights) -> None:
        """Rescale the first weights to the fan-in that the drawn masks keep."""
        if self._around is not None and rescales(self.rescale, self._around[1]):
            rescale_first_weights(self._around[1], weights, self.masks)

    def first_masks(self, weights: Weights) -> Masks:
        """Draw masks from the seed."""
        return drawn("DynamicMask", weights, self.density, self.layer_density, self.seed, "dynamic mask")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the moves."""
        super().on_train_start(trainer, pl_module)
        why = "whose step uses one history of gradients for several evaluations of the loss, wrong after a move"
        refuse_lbfgs(self, trainer.optimizers, why)
        self._clock.start(trainer, "DynamicMask", self.resumed)
        if not self.resumed:
            self._due = []
        if self.every_n_steps >= self._last:
            _warnings.warn(
                f"`DynamicMask(every_n_steps={self.every_n_steps})` never moves its mask, since moves end at step "
                f"{self._last} of {self._clock.total}; choose fewer steps."
            )

    @property
    def _last(self) -> int:
        """The step after which the mask stays."""
        return max(1, ceil_count(self.stop, self._clock.total))

    def shortfall(self) -> str | None:
        """Return that the mask could not move, if no step of the batches so far was reported."""
        return f"without a move of the mask{self._clock.reason}" if self._clock.unreported else None

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Move the mask if it is time, and mask the gradients."""
        if self._due:
            stepping = stepped_by(optimizer)
            ready = [name for name in self._due if id(self._weights[name]) in stepping and self._is_finite(name)]
            if ready:
                self._move(ready)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def _is_finite(self, name: str) -> bool:
        gradient = self._gradient(name)
        return gradient is not None and bool(torch.isfinite(gradient).all())

    def _gradient(self, name: str) -> Tensor | None:
        gradient = self._weights[name].grad
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _move(self, names: Sequence[str]) -> None:
        held = {name: self.masks[name] for name in names}
        share = cosine(self.fraction, self._clock.step, self._last + 1)
        left = prune(scores.magnitude({name: self._weights[name] for name in names}), held, share)
        self.hold(regrow(self._growth_scores(names), left, counts(held)))
        self._due = [name for name in self._due if name not in held]

    def _growth_scores(self, names: Sequence[str]) -> Weights:
        if self.growth == "gradient":
            gradients = {name: self._gradient(name) for name in names}
            return scores.gradient({name: grad for name, grad in gradients.items() if grad is not None})
        self._draws += 1
        weights = {name: self._weights[name] for name in names}
        return scores.random(weights, generator(self.seed, "grow", self._draws))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, and determine whether the next step moves the mask."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._clock.tick(trainer) and self._clock.step % self.every_n_steps == 0 and self._clock.step < self._last:
            self._due = list(self.masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and the state of the schedule."""
        plan = {"clock": self._clock.state_dict(), "due": list(self._due), "draws": self._draws}
        return super().state_dict() | plan

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks and the schedule of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._due, self._draws = list(state_dict["due"]), state_dict["draws"]
