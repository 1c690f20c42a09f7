"""When the masked weights of a stack have to be zeroed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.masking import leaves_zeros
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback
from lightning_sparsefl.sparse.apply import InPlaceMask


class LastingZeros:
    """Zeroes the weights that masks do not keep where they are not 0 by themselves, as a `MaskingCallback` does.

    After a step they still are if the optimizer leaves them alone and no callback writes weights, or gradients that are
    masked already. What else writes weights, such as a training step, shows in their version counters.

    Args:
        masks: Masks of all clients of a stack.
        leaves: Weights of all clients.

    Example:
        >>> leaves = {"w": torch.ones(2, 3)}
        >>> zeros = LastingZeros({"w": InPlaceMask(torch.eye(2, 3, dtype=torch.bool), torch.float32)}, leaves)
        >>> zeros.restore()
        >>> leaves["w"]
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
    """

    def __init__(self, masks: Mapping[str, InPlaceMask], leaves: Leaves) -> None:
        self._masks, self._leaves = masks, leaves
        self._lasts = False
        self._versions: dict[str, int] = {}

    def prepare(self, owner: StackedCallback, optimizer: Optimizer, chain: Sequence[StackedCallback]) -> None:
        """Find out whether zeros last.

        Args:
            owner: Callback that masks.
            optimizer: Optimizer of the stack.
            chain: Callbacks of the stack, in the order in which they act.
        """
        behind = chain[chain.index(owner) + 1 :]
        moved = any(type(each).before_step is not StackedCallback.before_step for each in behind)
        written = any(each.writes(name) for each in chain if each is not owner for name in self._masks)
        self._lasts = leaves_zeros(optimizer) and not moved and not written

    def before_batch(self, leaves: Leaves) -> None:
        """Store the versions of weights, all of which are 0 where they are not kept.

        Args:
            leaves: Weights of the clients of the batch.
        """
        self._versions = {name: leaves[name]._version for name in self._masks}

    def before_step(self, leaves: Leaves, masks: Mapping[str, InPlaceMask]) -> None:
        """Zero the weights of some clients if they have been written since the batch began.

        Args:
            leaves: Weights of the clients of the batch.
            masks: Masks of these clients.
        """
        if any(leaves[name]._version != version for name, version in self._versions.items()):
            _zero(leaves, masks)

    def without_step(self, leaves: Leaves, masks: Mapping[str, InPlaceMask]) -> None:
        """Zero the weights of some clients after a batch without a step, if it may have written them.

        Args:
            leaves: Weights of the clients of the batch.
            masks: Masks of these clients.
        """
        if self._lasts:
            self.before_step(leaves, masks)
        else:
            _zero(leaves, masks)

    def after_step(self, leaves: Leaves, masks: Mapping[str, InPlaceMask]) -> None:
        """Zero the weights of some clients after a step of the optimizer, unless they still are 0.

        Args:
            leaves: Weights of the clients that have stepped.
            masks: Masks of these clients.
        """
        if not self._lasts:
            _zero(leaves, masks)

    def restore(self) -> None:
        """Zero the weights of all clients."""
        _zero(self._leaves, self._masks)


@torch.no_grad()
def _zero(leaves: Leaves, masks: Mapping[str, InPlaceMask]) -> None:
    for name, mask in masks.items():
        mask.zero_(leaves[name])
