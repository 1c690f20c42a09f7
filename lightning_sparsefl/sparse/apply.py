"""Masks applied in place, at every training step, from one byte a weight."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of each element size, in bytes; in a view as integers, bits are compared, and -0.0 differs from 0.0."""
_CHUNK = 1 << 17
"""Number of elements that are multiplied at once: the mask is first copied to integers of the width of the values,
since a CPU multiplies fast by numbers of the same type only, and a copy of this size stays in its cache."""


class InPlaceMask:
    """A mask, made ready to be applied often to tensors of its shape and device.

    A value is multiplied as an integer of its own width: by 1 it keeps its bits, by 0 it becomes 0.0, also where it was
    NaN, infinite or negative, of which a product of floats would leave NaN and -0.0.

    Args:
        mask: Bool tensor of any shape.
        dtype: Type of the tensors, floating-point or complex.

    Example:
        >>> tensor, rest = torch.tensor([-1.0, torch.nan, 3.0]), torch.empty(3)
        >>> InPlaceMask(torch.tensor([False, False, True]), tensor.dtype).zero_(tensor)
        >>> tensor
        tensor([0., 0., 3.])
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        self._pairs = dtype.itemsize == 16  # complex128, for which no integer is wide enough
        self._dtype = dtype
        self.mask = mask.unsqueeze(-1) if self._pairs else mask
        self._integer = INTEGERS[8 if self._pairs else dtype.itemsize]
        self._parts: list[tuple[Tensor, Tensor]] = []
        if not self._pairs and mask.device.type == "cpu" and mask.is_contiguous():
            scratch = _scratch(self._integer)
            self._parts = [(part, scratch[: part.numel()]) for part in mask.view(-1).split(_CHUNK)]

    def __getitem__(self, rows: slice) -> InPlaceMask:
        """Return the mask of some rows, which are a view of this one.

        Example:
            >>> tensor = torch.ones(1, 2)
            >>> InPlaceMask(torch.eye(2, dtype=torch.bool), tensor.dtype)[1:].zero_(tensor)
            >>> tensor
            tensor([[0., 1.]])
        """
        mask = self.mask[rows]
        return InPlaceMask(mask.squeeze(-1) if self._pairs else mask, self._dtype)

    def zero_(self, tensor: Tensor) -> None:
        """Zero a tensor where the mask is False; it may also be sparse, as the gradient of an embedding."""
        if tensor.is_sparse:
            tensor.mul_(self.mask)
            return
        bits = self._bits(tensor)
        if self._parts and bits.is_contiguous():
            for part, (kept, ones) in zip(bits.view(-1).split(_CHUNK), self._parts, strict=True):
                part.mul_(ones.copy_(kept))
        else:
            bits.mul_(self.mask)

    def _bits(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor as integers; of pairs of numbers, in a last dimension of two."""
        plain = tensor.detach()
        return (torch.view_as_real(plain) if self._pairs else plain).view(self._integer)

    def split_(self, tensor: Tensor, rest: Tensor) -> None:
        """Zero a tensor where the mask is False, and put what was there into `rest`, which is 0.0 elsewhere.

        Example:
            >>> tensor, rest = torch.tensor([1.0, 2.0]), torch.empty(2)
            >>> InPlaceMask(torch.tensor([True, False]), tensor.dtype).split_(tensor, rest)
            >>> tensor, rest
            (tensor([1., 0.]), tensor([0., 2.]))
        """
        bits, others = self._bits(tensor), self._bits(rest)
        if self._parts and bits.is_contiguous() and others.is_contiguous():
            flat = bits.view(-1).split(_CHUNK), others.view(-1).split(_CHUNK)
            for part, other, (kept, ones) in zip(*flat, self._parts, strict=True):
                other.copy_(part)
                other.sub_(part.mul_(ones.copy_(kept)))
        else:
            torch.mul(bits, ~self.mask, out=others)
            bits.mul_(self.mask)

    def join_(self, tensor: Tensor, rest: Tensor) -> None:
        """Replace a tensor by `rest` where the mask is False; the inverse of :meth:`split_`.

        Args:
            tensor: Tensor that is changed.
            rest: Tensor that is 0.0 where the mask is True.

        Example:
            >>> tensor, rest = torch.tensor([1.0, torch.nan]), torch.tensor([0.0, 2.0])
            >>> InPlaceMask(torch.tensor([True, False]), tensor.dtype).join_(tensor, rest)
            >>> tensor
            tensor([1., 2.])
        """
        self.zero_(tensor)
        self._bits(tensor).add_(self._bits(rest))


@functools.cache
def _scratch(dtype: torch.dtype) -> Tensor:
    return torch.empty(_CHUNK, dtype=dtype)
