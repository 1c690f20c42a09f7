"""Weight gradients from the largest inputs of each layer.

Raihan and Aamodt, "Sparse weight activation training", NeurIPS 2020, arXiv:2001.01969; as in Guastella et al.,
"SparsyFed", arXiv:2504.05153, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.prune import keep_largest


class SparseInputs(Callback):
    """Computes weight gradients of linear and convolutional layers from the largest of their inputs.

    A layer keeps that share of the numbers of a batch that its own weights have of non-zeros, and one at least; outputs
    and the gradients of inputs are exact. In evaluation, and where no weight is 0, nothing is changed. An inexact
    gradient is what saves memory on hardware that stores sparse inputs; this implementation computes a second forward
    pass of the layer instead.
    """

    def __init__(self) -> None:
        self._layers: list[Any] = []

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Replace the forward functions of the layers."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self._layers = [layer for layer in pl_module.modules() if type(layer) in kinds]
        for layer in self._layers:  # a closure would let deep copies compute with the weights of this module
            layer.forward = functools.partial(_forward, layer, layer.forward)

    def _release(self) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore the forward functions."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the forward functions also where the run failed, since Lightning calls no teardown then."""
        self._release()


def _forward(layer: Any, exact: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    weight = layer.weight
    kept = int(torch.count_nonzero(weight.detach()))
    if not (layer.training and torch.is_grad_enabled()) or kept == weight.numel():
        return exact(input)
    # the second term is 0, and its gradient is that of the weight
    through = linear_map(layer, sparsified(input.detach(), kept / weight.numel()), weight, None)
    return linear_map(layer, input, weight.detach(), layer.bias) + (through - through.detach())


def linear_map(layer: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a linear or convolutional layer computes with other weights.

    Args:
        layer: The layer.
        inputs: Inputs of the layer.
        weight: Weight to use.
        bias: Bias to use, if any.
    """
    output: Tensor = (
        F.linear(inputs, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(inputs, weight, bias)
    )
    return output


def sparsified(inputs: Tensor, density: float) -> Tensor:
    """Return the numbers with the largest magnitudes, and zeros.

    Args:
        inputs: Numbers of a batch, of any shape.
        density: Fraction of them to keep, in [0, 1]; one number at least is kept if there are any.

    Example:
        >>> sparsified(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), 0.5)
        tensor([[ 0., -3.],
                [ 2.,  0.]])
    """
    kept = min(inputs.numel(), max(1, floor_count(density, inputs.numel())))
    return torch.where(keep_largest(inputs.abs(), kept), inputs, 0.0)
