"""Masks with error feedback: the model is pruned, what the optimizer steps is not.

Lin et al., "Dynamic model pruning with feedback", ICLR 2020, arXiv:2006.07253, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.types import Masks, Weights


class ErrorFeedback(MaskingCallback):
    """Trains dense weights by the gradients of the pruned ones: ``w <- w - lr * grad f(w * m)``, m as given.

    The module holds ``w * m`` wherever it is looked at, in forward passes, validation and checkpoints alike; the rest
    of w is here, joins the module only for the optimizer's step, and is in this callback's part of a checkpoint.
    Momentum and weight decay act on the dense weights.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Named bool tensors to prune by, which say by themselves which layers; None = dense.

    Raises:
        InvalidOption: If another callback masks the same weights, or the optimizer is LBFGS.
        IncompatibleMasks: If masks or pruned weights do not fit the module.
    """

    def __init__(self, layers: list[str] | str | None = None, masks: Masks | None = None) -> None:
        super().__init__(layers, masks)
        self._pruned: dict[str, Tensor] = {}
        self._joined = False

    @property
    def pruned(self) -> Weights:
        """What is pruned of the dense weights, by name; zero where the mask keeps."""
        return self._pruned

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
        """Part the weights again right after every step."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise InvalidOption(
                    f"`{type(self).__name__}` cannot serve LBFGS, which evaluates the loss in the middle of its "
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
            for name, weight in self._weights.items():
                self._stencils[name].split_(weight, self._pruned[name])
            self._joined = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Part the weights, also where mixed precision skipped the step."""
        self._part()
        self.mask_copies()

    def release(self) -> None:
        """Leave the module pruned, and let go of its tensors and of the optimizers."""
        self._part()
        super().release()

    def state_dict(self) -> dict[str, Any]:
        """The masks, one bit a weight, and what they prune of the dense weights."""
        return super().state_dict() | {"pruned": dict(self._pruned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the masks and the dense weights of a checkpoint."""
        super().load_state_dict(state_dict)
        self._pruned = dict(state_dict["pruned"])
