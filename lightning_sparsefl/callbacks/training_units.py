"""Units of a module, found in its training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.trial import first_samples, trial, trial_loss
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.attributes import attribute_replaced
from lightning_sparsefl.sparse.units import UnitGroup, find_groups


def units_in_training(module: LightningModule, batch: Any, batch_idx: int) -> Sequence[UnitGroup]:
    """Return the groups of units that a training step passes through; the module is left as it was.

    Args:
        module: Module of the user.
        batch: Training batch, of which two samples are used if the step accepts them.
        batch_idx: Number of the batch.

    Raises:
        InvalidOption: If the module optimizes manually, as its step then cannot be tried.
    """
    if not module.automatic_optimization:
        raise InvalidOption(
            f"The units of `{type(module).__name__}` cannot be found in its training step, since it optimizes "
            "manually; expected `automatic_optimization = True`, or groups from `find_groups`."
        )

    forward = module.forward

    def step(batch: Any) -> Tensor:
        with attribute_replaced(module, "forward", forward):  # which the step may call
            return trial_loss(module, batch, batch_idx)

    def find(batch: Any) -> Sequence[UnitGroup]:
        with attribute_replaced(module, "forward", step), trial(module):
            return find_groups(module, batch)

    try:
        return find(first_samples(batch))
    except InvalidOption:  # a step may want whole batches
        return find(batch)
