"""Prune while training, and let what was pruned come back.

Lin et al., "Dynamic model pruning with feedback", ICLR 2020, arXiv:2006.07253, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import require_density, require_interval, require_window
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.density import ceil_count, floor_count
from lightning_sparsefl.sparse.masks import dense_like, density, kept
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.schedule import gradual
from lightning_sparsefl.sparse.scores import magnitude


class DynamicPruningWithFeedback(MaskingCallback):
    """Trains dense weights by the gradients of the pruned ones: ``w <- w - lr * grad f(w * m)`` (DPF).

    The module holds ``w * m`` wherever it is looked at, in forward passes, validation and checkpoints alike; the rest
    of w is here, joins the module only for the optimizer's step, and is in this callback's part of a checkpoint.
    Momentum and weight decay act on the dense weights. Every few steps the mask is taken anew from the magnitudes of
    all dense weights together, so that a weight that has grown while it was pruned returns.

    The density falls as in :class:`GradualPruning`; a second `fit` starts from the density, the mask and the dense
    weights that the first one reached.

    Args:
        density: Fraction of the layers' weights that is left in the end, in (0, 1].
        start: Share of the training before pruning starts, in [0, 1).
        end: Share of the training at which the density is reached, in (start, 1]; masks move until the end.
        every_n_steps: Optimizer steps between two masks; there is one at `end` in any case.
        layers: Patterns of layer names, such as ``["*conv*", "!head*"]``; None = all tensors of two or more
            dimensions.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, the length of the training is unknown, or the optimizer is LBFGS.

    Example:
        >>> DynamicPruningWithFeedback(density=0.1).every_n_steps
        16
    """

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
        self._window = (0, 1)
        self._initial = 1.0
        self._pruned: dict[str, Tensor] = {}
        self._joined = False
        self._hooks: list[Any] = []

    def started(self) -> None:
        """Take up the pruned part of the dense weights, none at first."""
        for name, weight in self._weights.items():
            if name not in self._pruned:
                self._pruned[name] = torch.zeros_like(weight, requires_grad=False)
            elif self._pruned[name].shape != weight.shape:
                shapes = f"{tuple(self._pruned[name].shape)}, expected {tuple(weight.shape)}"
                raise IncompatibleMasks(f"What was pruned of `{name}` has shape {shapes}.")
        self._pruned = {n: self._pruned[n].to(w.device, w.dtype, copy=True) for n, w in self._weights.items()}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the masks, and part the weights again right after every step."""
        if not self._clock.start(trainer, "DynamicPruningWithFeedback"):
            self._initial = density(self.masks)
        first = floor_count(self.start, self._clock.total)
        self._window = (first, max(first + 1, ceil_count(self.end, self._clock.total)))
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise InvalidOption(
                    "`DynamicPruningWithFeedback` cannot serve LBFGS, which evaluates the loss in the middle of its "
                    "step; expected an optimizer that does so before, such as SGD or Adam."
                )
            # a module that optimizes by itself may look at the weights before the batch ends
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._part()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Make the weights dense; their gradients are those of the pruned model."""
        self._join()

    @torch.no_grad()
    def _join(self) -> None:
        """Put the pruned weights into the module, beside the held ones."""
        if self._weights and not self._joined:
            torch._foreach_add_(list(self._weights.values()), list(self._pruned.values()))
            self._joined = True

    @torch.no_grad()
    def _part(self) -> None:
        """Leave the held weights in the module, and keep the pruned ones here."""
        if self._joined:
            weights, pruned = list(self._weights.values()), list(self._pruned.values())
            torch._foreach_copy_(pruned, weights)
            self.mask_weights()
            torch._foreach_sub_(pruned, weights)
            self._joined = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Part the weights, and take a new mask if it is time."""
        self._part()  # also where mixed precision skipped the step
        if self._clock.tick(trainer) and self._due():
            self._remask()

    def _due(self) -> bool:
        step, (first, last) = self._clock.step, self._window
        return step == last or (step >= first and (step - first) % self.every_n_steps == 0)

    def _remask(self) -> None:
        self._join()
        everything = dense_like(self._weights)
        share = gradual(self._initial, self.density, self._clock.step, *self._window)
        count = min(kept(self.masks), max(1, floor_count(share, kept(everything))))
        self.adopt(shrink_globally(magnitude(self._weights), everything, count))
        self._part()

    def release(self) -> None:
        """Leave the module pruned, and let go of its tensors and of the optimizers."""
        self._part()
        super().release()
        self._clock.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """The masks, one bit a weight, what they prune of the dense weights, and where the schedule stands."""
        plan = {"clock": self._clock.state_dict(), "initial": self._initial}
        return super().state_dict() | {"pruned": dict(self._pruned)} | plan

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the masks, the dense weights and the schedule of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._pruned, self._initial = dict(state_dict["pruned"]), state_dict["initial"]
