"""Callbacks that mask, and what tests ask of them."""

from __future__ import annotations

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradualPruning,
    StaticMask,
)
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.sparse.prune import keep_largest

KINDS = [StaticMask, DynamicMask, GradualPruning, GlobalMagnitudePruning, DynamicPruningWithFeedback]
"""Kinds that differ in how they come by their masks."""


class PrunesOnce(MaskingCallback):
    """Prunes by magnitude before the fourth step, as a user would write it."""

    stackable = True
    steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.prune(pl_module)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def prune(self, module):
        self.steps += 1
        if self.steps == 4:
            weights = {name: module.get_parameter(name).detach() for name in self.masks}
            self.hold({name: keep_largest(weight.abs(), weight.numel() // 2) for name, weight in weights.items()})


class PrunesLate(PrunesOnce):
    """Does so when the gradients are masked."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        MaskingCallback.on_before_optimizer_step(self, trainer, pl_module, optimizer)
        self.prune(pl_module)


class PrunesAtEpochs(PrunesOnce):
    """Does so between two batches."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        MaskingCallback.on_before_optimizer_step(self, trainer, pl_module, optimizer)

    def on_train_epoch_start(self, trainer, pl_module):
        self.steps = 3 * (trainer.current_epoch == 1)
        self.prune(pl_module)


PRUNERS = [PrunesOnce, PrunesLate, PrunesAtEpochs]
"""Subclasses of a user that call `hold` alone, each in another place."""


def kept_of(callback):
    return {name: mask.clone() for name, mask in callback.masks.items()}
