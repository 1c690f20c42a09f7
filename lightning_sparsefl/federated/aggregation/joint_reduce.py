"""Sum of several tensors over the ranks with one all-reduce for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the ranks in place and returns it."""


def reduce_together(reduce: AllReduce, tensors: Sequence[Tensor]) -> None:
    """Sum tensors over the ranks in place, all of one dtype in one call.

    A call takes time that does not depend on its size. A dtype with a single tensor is summed without a copy.

    Args:
        reduce: Function that sums a tensor over the ranks in place.
        tensors: Tensors on one device, of the same shapes and dtypes and in the same order on all ranks.

    Example:
        >>> tensors = [torch.ones(2), torch.ones(1, dtype=torch.int32), torch.ones(1, 1)]
        >>> reduce_together(lambda tensor: tensor.mul_(3), tensors)
        >>> tensors
        [tensor([3., 3.]), tensor([3], dtype=torch.int32), tensor([[3.]])]
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        parts = [tensor for tensor in tensors if tensor.dtype == dtype]
        if len(parts) == 1:
            reduce(parts[0])
            continue
        sums = reduce(torch.cat([part.reshape(-1) for part in parts]))
        for part, total in zip(parts, sums.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
