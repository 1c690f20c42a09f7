"""Weight gradients of several clients from the largest inputs of their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.callbacks.activation_pruning import ActivationPruning, largest, pruned_layers
from lightning_sparsefl.callbacks.sparse_inputs import SparseInputs, linear_map, sparsified
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass
from lightning_sparsefl.errors import InvalidOption

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class StackedInputs(StackedCallback):
    """Base class: replaces the forward functions of layers by ones whose weight gradients are those of other inputs.

    Args:
        module: Module of the user.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._layers: list[Any] = []
        self._now: list[StackedPass] = []

    def layers(self) -> list[Any]:
        """Return the layers whose forward functions are replaced."""
        raise NotImplementedError

    def chosen(self, layer: Any, inputs: Tensor, batch: StackedPass) -> Tensor | None:
        """Return the inputs that the weight gradient is of, with the clients in dimension 0; None for all.

        Args:
            layer: Layer in training.
            inputs: Inputs of the layer, with the clients in dimension 0.
            batch: Batch that is passed.
        """
        raise NotImplementedError

    def start(self, leaves: Leaves) -> None:
        """Replace the forward functions."""
        self._layers = self.layers()
        for layer in self._layers:
            layer.forward = partial(self._forward, layer, layer.forward)

    def before_pass(self, batch: StackedPass) -> None:
        """Let the layers know the batch."""
        self._now[:] = [batch]

    def _forward(self, layer: Any, exact: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        if not (layer.training and torch.is_grad_enabled() and self._now):
            return exact(input)
        batch = self._now[0]
        chosen = self.chosen(layer, batch.plain(input).detach(), batch)
        if chosen is None:
            return exact(input)
        # the second term is 0, and its gradient is that of the weight
        through = linear_map(layer, batch.clients(chosen), layer.weight, None)
        return linear_map(layer, input, layer.weight.detach(), layer.bias) + (through - through.detach())

    def release(self) -> None:
        """Restore the forward functions."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers, self._now = [], []


class StackedSparseInputs(StackedInputs):
    """Counterpart of :class:`SparseInputs`: each client's weights say how many of its inputs are kept."""

    def __init__(self, callbacks: Sequence[SparseInputs], module: nn.Module) -> None:
        super().__init__(module)

    def layers(self) -> list[Any]:
        """Return the linear and convolutional layers."""
        return [layer for layer in self.module.modules() if type(layer) in _KINDS]

    def chosen(self, layer: Any, inputs: Tensor, batch: StackedPass) -> Tensor | None:
        """Return the largest inputs of each client, as many as the density of its weights says."""
        weights = batch.plain(layer.weight).detach().flatten(1)
        kept, size = weights.count_nonzero(dim=1).tolist(), weights.shape[1]
        if all(number == size for number in kept):
            return None
        return torch.stack([sparsified(each, number / size) for each, number in zip(inputs, kept, strict=True)])


class StackedActivations(StackedInputs):
    """Counterpart of :class:`ActivationPruning`; a stack keeps the pruned inputs beside the dense ones.

    Where inputs are equal up to rounding, as behind a convolution of a picture with equal patches, it may keep others.
    """

    def __init__(self, callbacks: Sequence[ActivationPruning], module: nn.Module) -> None:
        super().__init__(module)
        self.density = callbacks[0].density

    def layers(self) -> list[Any]:
        """Return the layers whose inputs are pruned.

        Raises:
            InvalidOption: If a convolution is transposed, or of a class of the user.
        """
        found = pruned_layers(self.module)
        other = next((layer for layer in found if type(layer) not in _KINDS), None)
        if other is not None:
            raise InvalidOption(f"`ActivationPruning` has no stacked form for a `{type(other).__name__}`.")
        return found

    def chosen(self, layer: Any, inputs: Tensor, batch: StackedPass) -> Tensor | None:
        """Return the largest inputs of each client."""
        kept = torch.stack([largest(each, self.density) for each in inputs])
        return torch.where(kept, inputs, 0.0)
