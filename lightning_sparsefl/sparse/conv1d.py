"""The ``Conv1D`` of the package transformers, a linear layer whose weight is stored as (inputs, outputs)."""

from __future__ import annotations

from torch import nn


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is a ``transformers.pytorch_utils.Conv1D``, as in GPT-2; the package is not imported.

    Args:
        layer: Layer of a model.

    Example:
        >>> Conv1D = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
        >>> is_conv1d(Conv1D()), is_conv1d(nn.Conv1d(1, 1, 1))
        (True, False)
    """
    names = [(kind.__module__, kind.__qualname__) for kind in type(layer).__mro__]
    return ("transformers.pytorch_utils", "Conv1D") in names


def inputs_come_first(layer: nn.Module) -> bool:
    """Return whether the inputs of a layer are the first dimension of its weight, rather than the outputs.

    Args:
        layer: Layer of a model.

    Example:
        >>> inputs_come_first(nn.ConvTranspose2d(1, 2, 3)), inputs_come_first(nn.Conv2d(1, 2, 3))
        (True, False)
    """
    return isinstance(layer, nn.modules.conv._ConvTransposeNd) or is_conv1d(layer)
