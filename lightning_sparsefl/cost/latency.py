"""Parameters, operations and measured latency of a module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_sparsefl.cost.flops import count_layers, forward_flops
from lightning_sparsefl.errors import InvalidOption


@dataclass(frozen=True)
class ModelCosts:
    """What a module costs on one input."""

    parameters: int
    """Number of parameters, zeros included."""
    flops: float
    """Operations of a forward pass; see :mod:`~lightning_sparsefl.cost.flops`. Zeros are counted."""
    seconds: float
    """Median time of a forward pass on the module's device."""


def measure(module: nn.Module, *example_inputs: Any, seconds: float = 0.5) -> ModelCosts:
    """Count the parameters and operations of a module and measure its latency, in evaluation mode without gradients.

    Args:
        module: Module, which is not changed.
        example_inputs: Arguments of ``forward``, on the module's device; their batch is that of the result.
        seconds: Time to measure for.

    Raises:
        InvalidOption: If `seconds` is not positive.

    Example:
        >>> costs = measure(nn.Linear(3, 2), torch.zeros(1, 3), seconds=0.01)
        >>> costs.parameters, costs.flops, costs.seconds > 0
        (8, 14.0, True)
    """
    if not seconds > 0:
        raise InvalidOption(f"`seconds={seconds}`: expected a positive number.")
    from torch.utils.benchmark import Timer  # imports torch's compiler of extensions, which warns without a GPU

    module = copy.deepcopy(module).eval()
    with torch.inference_mode():
        module(*example_inputs)
        timer = Timer("module(*inputs)", globals={"module": module, "inputs": example_inputs})
        latency = timer.blocked_autorange(min_run_time=seconds).median
    return ModelCosts(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        flops=forward_flops(count_layers(module, example_inputs)),
        seconds=latency,
    )
