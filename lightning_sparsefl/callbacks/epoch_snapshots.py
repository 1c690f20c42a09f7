"""Copies of the parameters at the ends of epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.numbered import NumberedCallback
from lightning_sparsefl.callbacks.options import check_arguments, require


class EpochSnapshots(NumberedCallback):
    """Copies all parameters at the ends of chosen epochs, for methods that compare two moments of a fit.

    Alongside callbacks that mask, the copies are those of the masked weights.

    Args:
        epochs: Numbers of the epochs of a fit, from 1, at whose ends parameters are copied.

    Raises:
        InvalidOption: If a number is below 1.

    Example:
        >>> EpochSnapshots(epochs=[1, 5]).epochs
        (1, 5)
    """

    stackable = True

    @check_arguments
    def __init__(self, epochs: Sequence[int]) -> None:
        require(all(epoch >= 1 for epoch in epochs), "EpochSnapshots", "epochs", epochs, "whole numbers >= 1")
        self.epochs = tuple(epochs)
        self.snapshots: dict[int, dict[str, Tensor]] = {}
        """Copies of the parameters by epoch and name; empty before the fit."""
        self._before: int | None = None

    def key_options(self) -> dict[str, Any]:
        """Return the epochs."""
        return {"epochs": self.epochs}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget the copies of the last fit; a checkpoint brings its own later."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.snapshots, self._before = {}, None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store how many epochs the trainer had finished, unless the fit was resumed."""
        if self._before is None:
            self._before = trainer.current_epoch

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy the parameters of the epoch before, if a fit was resumed after its last batch and before its end."""
        self._copy(pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Copy the parameters if the epoch is one of those chosen."""
        self._copy(pl_module, trainer.current_epoch + 1)

    def _copy(self, module: LightningModule, finished: int) -> None:
        assert self._before is not None
        epoch = finished - self._before
        if epoch in self.epochs and epoch not in self.snapshots:
            self.snapshots[epoch] = {name: p.detach().clone() for name, p in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, and the number of epochs before the fit."""
        return {"snapshots": dict(self.snapshots), "before": self._before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the copies of a checkpoint."""
        self.snapshots, self._before = dict(state_dict["snapshots"]), state_dict["before"]
