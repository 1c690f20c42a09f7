"""Pruning of the activations that layers save for their weight gradients.

Huang, Zhuang, Chen, Lyu, "FedMef: Towards memory-efficient federated dynamic pruning", CVPR 2024, arXiv:2403.14737.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_sparsefl.callbacks.options import check_arguments, require_density
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.sparse.prune import keep_largest, select

Saved = Tensor | tuple[Tensor, Tensor, torch.Size]
"""A saved tensor, or the packed mask, the kept values and the shape of one."""


class ActivationPruning(Callback):
    """Keeps only the largest inputs of linear and convolutional layers for the backward pass.

    Outputs and the gradients of inputs are exact; the gradients of weights are those of the pruned inputs. Inputs are
    stored as their values and one bit for each position. Layers that other modules call through functions of PyTorch,
    such as those of attention, and convolutions that pad with values other than zeros are left alone.

    Args:
        density: Fraction of the inputs of a batch that is kept, those of largest magnitude, in (0, 1]; at least one.

    Raises:
        InvalidOption: If `density` is out of its range.

    Example:
        >>> ActivationPruning(0.25).density
        0.25
    """

    @check_arguments
    def __init__(self, density: float = 0.5) -> None:
        require_density("ActivationPruning", density)
        self.density = density
        self._wrapped: list[nn.Module] = []

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Wrap the layers' forward passes."""
        for layer in pruned_layers(pl_module):
            if "forward" not in vars(layer):
                layer.forward = pruning_forward(layer, self.density)
                self._wrapped.append(layer)

    def _unwrap(self) -> None:
        for layer in self._wrapped:
            vars(layer).pop("forward", None)
        self._wrapped = []

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restore the layers."""
        self._unwrap()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore the layers."""
        self._unwrap()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the layers also where the run failed, since Lightning calls no teardown then."""
        self._unwrap()


def pruned_layers(module: nn.Module) -> list[Any]:
    """Return the layers whose saved inputs are pruned: linear layers, and convolutions that pad with zeros if at all.

    Convolutions that pad one side more than the other, as ``padding="same"`` with an even kernel does, save a padded
    copy, and are left out.

    Args:
        module: Module of the user.

    Example:
        >>> padded = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        >>> pruned_layers(nn.Sequential(padded, nn.ReLU(), nn.Linear(2, 1)))
        [Linear(in_features=2, out_features=1, bias=True)]
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return [layer for layer in module.modules() if isinstance(layer, kinds) and _saves_its_input(layer)]


def _saves_its_input(layer: Any) -> bool:
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return False
    if getattr(layer, "padding", None) != "same":
        return True
    return all(rate * (size - 1) % 2 == 0 for rate, size in zip(layer.dilation, layer.kernel_size, strict=True))


def largest(inputs: Tensor, density: float) -> Tensor:
    """Return a mask of the inputs of largest magnitude.

    Args:
        inputs: Inputs of a layer, of any shape.
        density: Fraction that is kept, at least one input if there are any.

    Example:
        >>> largest(torch.tensor([1.0, -3.0]), 0.1)
        tensor([False,  True])
    """
    return keep_largest(inputs.abs(), min(inputs.numel(), max(1, round(density * inputs.numel()))))


def pruning_forward(layer: Any, density: float) -> Callable[..., Tensor]:
    """Return a layer's forward pass that saves only the largest inputs, for use in training.

    Args:
        layer: Linear or convolutional layer.
        density: Fraction of the inputs that is saved, in (0, 1].

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> out = pruning_forward(layer, 0.5)(torch.tensor([[1.0, 3.0]]))
        >>> out.backward()
        >>> layer.weight.grad
        tensor([[0., 3.]])
    """
    return functools.partial(_pruned, layer, density)  # whose layer is the copy's own in a deep copy of the module


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it cannot trace the choice of the largest
def _pruned(layer: Any, density: float, /, *args: Any, **kwargs: Any) -> Tensor:
    forward: Callable[..., Tensor] = type(layer).forward
    x, *more = args or (kwargs.pop(list(inspect.signature(forward).parameters)[1]),)
    if not (layer.training and torch.is_grad_enabled()):
        return forward(layer, x, *more, **kwargs)
    x = _autocast(x)  # else autocast saves a copy, which may look like that of the weight
    if isinstance(layer, nn.Linear) and x.dim() > 2:
        x = x.contiguous()  # else linear saves a copy, which `_is_input` does not know

    def compress(saved: Tensor) -> Saved:
        if not _is_input(saved, x):
            return saved
        mask = largest(saved, density)
        return pack(mask), select(saved, mask), saved.shape

    with saved_tensors_hooks(compress, _decompress):
        return forward(layer, x, *more, **kwargs)


def _autocast(x: Tensor) -> Tensor:
    """Return an input in the type in which autocast would give it to the layer."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if cast else x


def _is_input(saved: Tensor, x: Tensor) -> bool:
    """Return whether a saved tensor is a layer's input."""
    return saved.dtype == x.dtype and saved.data_ptr() == x.data_ptr() and saved.numel() == x.numel()


def _decompress(saved: Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    packed, values, shape = saved
    mask = unpack(packed, shape)
    return torch.zeros(shape, dtype=values.dtype, device=values.device).masked_scatter_(mask, values)
