"""A module's example input, as its layers take it."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn


def for_module(sample: Any, module: nn.Module) -> Any:
    """Return an example input on the device and in the precision of a module, where users seldom create it.

    Args:
        sample: Tensors, or collections of them, such as `example_input_array`.
        module: Module with parameters.

    Example:
        >>> import torch
        >>> for_module((torch.zeros(1), torch.tensor([2])), nn.Linear(1, 1).double())
        (tensor([0.], dtype=torch.float64), tensor([2]))
    """
    first = next(module.parameters())
    return apply_to_collection(
        sample, Tensor, lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None)
    )
