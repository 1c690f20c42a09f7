"""Training under a mask whose density moves to layers with large weights.

Babakniya et al., "Revisiting sparsity hunting in federated learning: why does sparsity consensus matter?", TMLR 2023,
arXiv:2208.13092, section 4.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.adjust import reallocated
from lightning_sparsefl.sparse.scores import random
from lightning_sparsefl.types import Masks


class LayerReallocation(MaskingCallback):
    """Drops small weights and draws others in their place, most in layers whose weights are large on average.

    The masks move after each epoch but the last one, or after the step behind the middle if there is one epoch. A move
    drops ``exchange * (1 - t / T)`` of each layer's weights after t of T steps, so that an epoch of one or two steps
    moves none. It is made for one local fit, which is not resumed from a checkpoint.

    Args:
        masks: Masks to start from, by parameter name.
        exchange: Fraction of a layer's kept weights that a move at the start would drop, in [0, 1).
        key: Key of the randomness of the moves.

    Example:
        >>> import torch
        >>> LayerReallocation({"w": torch.tensor([True, False])}, exchange=0.5, key=(0,)).exchange
        0.5
    """

    stackable = True
    grows_from_zero = True

    def __init__(self, masks: Masks, exchange: float, key: tuple[int | str, ...]) -> None:
        super().__init__(masks=masks)
        self.exchange, self.key = exchange, key
        self._clock = StepClock()
        self._moves = 0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start counting steps."""
        super().on_train_start(trainer, pl_module)
        self._clock.start(trainer, "LayerReallocation", self.resumed)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, and move the masks behind the middle of a single epoch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        stepped, middle = self._clock.tick(trainer), self._clock.total // 2 + 1
        if stepped and trainer.max_epochs == 1 and self._clock.step == middle:
            self._move()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask the weights, and move the masks between two epochs."""
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.current_epoch + 1 < trainer.max_epochs:
            self._move()

    def _move(self) -> None:
        self._moves += 1
        growth = random(self.masks, generator(*self.key, self._moves))
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        rate = self.exchange * (1 - self._clock.step / self._clock.total)
        self.hold(reallocated(weights, self.masks, rate, growth))
