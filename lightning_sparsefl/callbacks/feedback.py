"""Masks with error feedback: the model is pruned, the weights that the optimizer steps are dense.

Lin et al., "Dynamic model pruning with feedback", ICLR 2020, arXiv:2006.07253, section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.mask_owner import renamed
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.step_guard import refuse_lbfgs
from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.types import Masks, Weights


class ErrorFeedback(MaskingCallback):
    """Trains dense weights by the gradients of the pruned ones: ``w <- w - lr * grad f(w * m)``, m as given.

    The module holds ``w * m`` wherever it is looked at, in forward passes, validation and checkpoints alike; the rest
    of w is here, joins the module only for the optimizer's step, and is in this callback's part of a checkpoint.
    Momentum and weight decay act on the dense weights.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Bool tensors by name to prune by, which determine the layers; None = dense.

    Raises:
        InvalidOption: If another callback masks the same weights, or the optimizer is LBFGS.
        IncompatibleMasks: If masks or pruned weights do not fit the module.
    """

    writes_values = True

    def __init__(self, layers: list[str] | str | None = None, masks: Masks | None = None) -> None:
        super().__init__(layers, masks)
        self._pruned: dict[str, Tensor] = {}
        self._joined: list[str] = []

    @property
    def pruned(self) -> Weights:
        """The pruned part of the dense weights, by name; zero where the mask keeps."""
        self.collect()
        return self._pruned

    def _rename(self, parameters: Mapping[str, Tensor]) -> None:
        super()._rename(parameters)
        self._pruned = renamed(self._pruned, parameters)

    def started(self) -> None:
        """Take up the pruned part of the dense weights, zeros at first."""
        for name, weight in self._weights.items():
            if name not in self._pruned:
                self._pruned[name] = torch.zeros_like(weight, requires_grad=False)
            elif self._pruned[name].shape != weight.shape:
                shapes = f"{tuple(self._pruned[name].shape)}, expected {tuple(weight.shape)}"
                raise IncompatibleMasks(f"What was pruned of `{name}` has shape {shapes}.")
        self._pruned = {n: self._pruned[n].to(w.device, w.dtype, copy=True) for n, w in self._weights.items()}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse LBFGS, and guard the steps of all other optimizers."""
        refuse_lbfgs(self, trainer.optimizers, "which evaluates the loss in the middle of its step")
        self._guard(trainer)

    def mask_weights(self, names: Collection[str] | None = None) -> None:
        """Zero what is not held of the weights; the pruned part of the dense ones stays here."""
        self._part()
        super().mask_weights(names)

    def forget(self, optimizers: Iterable[Any], names: Iterable[str]) -> None:
        """Do nothing, since what optimizers remember is of the dense weights."""

    def before_loss(self, again: bool) -> None:
        """Prune the weights, which a step that evaluates the loss several times has made dense."""
        self._part()
        super().before_loss(again)

    def before_update(self, optimizer: Any) -> None:
        """Make the weights dense for a step that Lightning does not know of, such as one of the bare optimizer."""
        if not self._prepared:
            self._join_for(optimizer)

    def after_step(self, optimizer: Any) -> None:
        """Prune the weights again, right after the step: a module may read them before the batch ends."""
        self._note_step(optimizer)
        self._part()

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Make the weights dense; their gradients are those of the pruned model."""
        if not self._joined:
            self._mask_written()
        self._join_for(optimizer)
        self._prepared = True

    def _join_for(self, optimizer: Any) -> None:
        """Make the weights of an optimizer dense; a graph may need the others."""
        stepped = stepped_by(optimizer)
        self._join(name for name, weight in self._weights.items() if id(weight) in stepped)

    @torch.no_grad()
    def _join(self, names: Iterable[str]) -> None:
        """Put the pruned weights into the module, beside the held ones."""
        names = [name for name in names if name not in self._joined]
        if names:
            torch._foreach_add_([self._weights[name] for name in names], [self._pruned[name] for name in names])
            self._joined += names

    @torch.no_grad()
    def _part(self) -> None:
        """Leave the held weights in the module, and keep the pruned ones here."""
        if self._joined:
            for name in self._joined:
                self._stencils[name].split_(self._weights[name], self._pruned[name])
            self._joined = []
            self._note_versions()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Prune the weights, also where mixed precision skipped the step."""
        self._part()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def release(self) -> None:
        """Leave the module pruned, and release its tensors and the optimizers."""
        self._part()
        super().release()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and the pruned part of the dense weights."""
        return super().state_dict() | {"pruned": dict(self._pruned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks and the dense weights of a checkpoint."""
        super().load_state_dict(state_dict)
        self._pruned = dict(state_dict["pruned"])
        if self._weights:
            self.started()
