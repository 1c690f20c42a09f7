"""Gradients of several clients that are accumulated over batches (`trainer.accumulate_grad_batches`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.logs import NotStackable


class AccumulatedGradients:
    """Gradients of the batches that each client has trained on since its last optimizer step.

    Args:
        batches: Number of batches whose gradients make one step.
        size: Number of clients.
    """

    def __init__(self, batches: int, size: int) -> None:
        self.batches, self._size = batches, size
        self._sums: dict[str, Tensor] = {}
        self._has: dict[str, list[bool]] = {}
        """Whether a client has had a gradient of a weight since its last step."""

    def is_step(self, number: int, batches: int) -> bool:
        """Return whether a client takes an optimizer step after a batch.

        Args:
            number: Number of the batch in the epoch, from 0.
            batches: Number of the client's batches in an epoch.

        Example:
            >>> [AccumulatedGradients(2, 1).is_step(number, 3) for number in range(3)]
            [False, True, True]
        """
        return (number + 1) % self.batches == 0 or number + 1 == batches

    @torch.no_grad()
    def add_to(self, low: int, high: int, leaves: Mapping[str, Tensor]) -> None:
        """Add the sums to the gradients of a batch.

        Args:
            low: First client.
            high: Client after the last one.
            leaves: Weights of these clients, with the gradients of the batch.

        Raises:
            NotStackable: If some of the clients alone have had a gradient of a weight.
        """
        for name, leaf in leaves.items():
            has = set(self._has.get(name, [False])[low:high])
            if len(has) > 1:
                raise NotStackable(f"accumulates gradients of `{name}` for some of the clients alone")
            if has == {True}:
                earlier = self._sums[name][low:high]
                leaf.grad = earlier.clone() if leaf.grad is None else leaf.grad + earlier

    @torch.no_grad()
    def keep(self, low: int, high: int, leaves: Mapping[str, Tensor]) -> None:
        """Keep the gradients for the next batch; those of the leaves are then views of the sums.

        Args:
            low: First client.
            high: Client after the last one.
            leaves: Weights of these clients, with the gradients since their last step.
        """
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                if name not in self._sums:
                    self._sums[name] = leaf.grad.new_zeros(self._size, *leaf.shape[1:])
                    self._has[name] = [False] * self._size
                rows = self._sums[name][low:high]
                leaf.grad = rows.copy_(leaf.grad)
            if name in self._has:
                self._has[name][low:high] = [leaf.grad is not None] * (high - low)

    def clear(self, low: int, high: int) -> None:
        """Forget the gradients of clients that have taken a step.

        Args:
            low: First client.
            high: Client after the last one.
        """
        for has in self._has.values():
            has[low:high] = [False] * (high - low)
