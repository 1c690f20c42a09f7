"""Copies that reshaping makes of convolution kernels, which lie in memory otherwise than those of one client."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.logs import NotStackable

RESHAPING = {
    *(Tensor.reshape, Tensor.reshape_as, Tensor.view, Tensor.view_as, Tensor.flatten, Tensor.ravel, Tensor.contiguous),
    *(torch.reshape, torch.flatten, torch.ravel),
}
"""Functions that return a view of a contiguous tensor, and may return a copy of another one."""


def address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor.

    Args:
        tensor: Plain tensor.
    """
    return tensor.untyped_storage().data_ptr()


class KernelCopies:
    """Copies of weights and gradients that the module's code makes where it has views alone, and must not write into.

    Args:
        addresses: Addresses of the memory of weights and gradients of several clients.
    """

    def __init__(self, addresses: Collection[int]) -> None:
        self._addresses = addresses
        self._made: list[tuple[Tensor, int]] = []

    def note(self, source: Any, result: Any) -> None:
        """Note the result of a function that reshapes, if it is a copy of a weight or of a gradient.

        Args:
            source: Plain tensor that has been reshaped.
            result: Plain tensor that has been returned.
        """
        is_kernel = isinstance(source, Tensor) and source.dim() >= 4 and address(source) in self._addresses
        if is_kernel and address(result) not in self._addresses:
            self._made.append((result, result._version))

    def require_unwritten(self) -> None:
        """Raise :class:`NotStackable` if a copy has been written into, which alone writes into the tensor itself."""
        if any(copy._version != version for copy, version in self._made):
            raise NotStackable("writes into a reshaped kernel of a convolution or its gradient, of which it has a copy")
