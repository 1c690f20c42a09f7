"""Scale of first weights under a mask.

Evci et al., "Gradient flow in sparse neural networks and how lottery tickets win", AAAI 2022, arXiv:2010.03533,
section 3.1: an initialization whose variance is 1 over the fan-in of a dense layer is too small for a sparse one, so
that signals shrink from layer to layer; each output should have the variance of the inputs that it keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fan_in_scale(mask: Tensor, outputs: int = 0) -> Tensor:
    """Return ``sqrt(n / k)`` for each output, where n is its fan-in and k the part of it that a mask keeps.

    Args:
        mask: Bool tensor of two or more dimensions.
        outputs: Dimension of the outputs: 0 for linear and convolutional layers, 1 for layers whose inputs come first,
            such as transposed convolutions.

    Returns:
        Float tensor that is broadcast over the mask; 1 for outputs without a weight.

    Example:
        >>> mask = torch.tensor([[True, False, False, False], [True, True, True, True], [False] * 4])
        >>> fan_in_scale(mask).flatten()
        tensor([2., 1., 1.])
    """
    inputs = [dim for dim in range(mask.dim()) if dim != outputs]
    fan_in = mask.numel() // max(1, mask.shape[outputs])
    kept = mask.sum(dim=inputs, keepdim=True)
    return torch.where(kept > 0, fan_in / kept.clamp(min=1), 1.0).sqrt()
