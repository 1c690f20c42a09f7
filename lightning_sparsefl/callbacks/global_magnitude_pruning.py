"""Pruning by magnitude over all layers together, once or between epochs.

Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_sparsefl.callbacks.mask_owner import warning_cache
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import check_arguments, require, require_one_each
from lightning_sparsefl.sparse.density import ceil_count
from lightning_sparsefl.sparse.masks import density, kept
from lightning_sparsefl.sparse.prune import shrink_globally
from lightning_sparsefl.sparse.scores import magnitude


class GlobalMagnitudePruning(MaskingCallback):
    """Drops a fraction of the kept weights, the smallest of all layers together, at the start of some epochs.

    ``epochs=[0]`` is one-shot, for a module that is trained already; ``fraction=0.2, epochs=[0, 5, 10]`` leaves
    0.8, 0.64, 0.512. What was dropped stays so. Fits compound: a second `fit` by a new trainer counts its epochs from
    0 again, and drops the fraction of what the first one left. One by the same trainer goes on with its epochs, and so
    does one from a checkpoint: to prune a module that was trained to epoch 10, load its weights without `ckpt_path`, or
    set ``epochs=[10]``.

    Args:
        fraction: Fraction of the weights kept so far that is dropped, in [0, 1): the ``ceil(fraction * kept)``
            smallest.
        epochs: Numbers of the epochs, from 0, at whose start it prunes; None = ``[0]``.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, or fewer weights than layers would be left.

    Example:
        >>> GlobalMagnitudePruning(fraction=0.2, epochs=[0, 5, 10]).epochs
        [0, 5, 10]
    """

    stackable = True

    @check_arguments
    def __init__(
        self, fraction: float = 0.5, epochs: list[int] | None = None, layers: list[str] | str | None = None
    ) -> None:
        require(0 <= fraction < 1, "GlobalMagnitudePruning", "fraction", fraction, "a number in [0, 1)")
        known = epochs is None or (len(epochs) > 0 and min(epochs) >= 0)
        require(known, "GlobalMagnitudePruning", "epochs", epochs, "numbers of epochs, from 0")
        super().__init__(layers)
        self.fraction, self.epochs = fraction, [0] if epochs is None else list(epochs)
        self._pruned_at = -1
        self._passed: list[int] = []
        """Epochs before the first one of the fit."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune anew in a new fit."""
        super().on_train_start(trainer, pl_module)
        if self.resumed or self.fraction == 0:
            return
        self._pruned_at = trainer.current_epoch - 1 if density(self.masks) < 1 else -1
        self._passed = [epoch for epoch in self.epochs if self._pruned_at < epoch < trainer.current_epoch]
        if self._passed:
            warning_cache.warn(
                f"`GlobalMagnitudePruning(epochs={self.epochs})` does not prune at epochs {self._passed}, since the "
                f"fit begins with epoch {trainer.current_epoch}, as that of a checkpoint does; expected later ones."
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune if it is time."""
        self._prune_if_due(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Prune before the first batch of an epoch that a resumed fit begins without `on_train_epoch_start`."""
        self._prune_if_due(trainer)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _prune_if_due(self, trainer: Any) -> None:
        epoch = trainer.current_epoch
        if epoch in self.epochs and epoch > self._pruned_at:
            before = kept(self.masks)
            left = before - ceil_count(self.fraction, before)
            require_one_each("GlobalMagnitudePruning", "fraction", self.fraction, left, self._weights)
            self.hold(shrink_globally(magnitude(self._weights), self.masks, left))
            self._pruned_at = epoch

    def shortfall(self) -> str | None:
        """Return the density, and which epochs have not been reached, if there are any."""
        missed = sorted({*self._passed, *(epoch for epoch in self.epochs if epoch > self._pruned_at)})
        return f"at density {density(self.masks):.3g}, before epochs {missed} pruned" if missed else None

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and the last epoch at which weights were pruned."""
        return super().state_dict() | {"pruned_at": self._pruned_at, "passed": self._passed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks of a checkpoint."""
        super().load_state_dict(state_dict)
        self._pruned_at, self._passed = state_dict["pruned_at"], list(state_dict.get("passed", ()))
