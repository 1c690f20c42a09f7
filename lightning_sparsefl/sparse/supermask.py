"""Random masks over fixed weights (Isik et al., "FedPM", arXiv:2209.15328)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.types import Weights

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def fan_ins(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the weights and biases of linear and convolutional layers, with the number of inputs of an output.

    A layer whose weight is computed from a parameter, as by spectral norm, is left out.

    Example:
        >>> [(name, fan_in) for name, _, fan_in in fan_ins(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))]
        [('0.weight', 18), ('0.bias', 18)]
    """
    for path, layer in supermasked(module):
        own = dict(layer.named_parameters(prefix=path, recurse=False))
        names = [f"{path}.{leaf}".lstrip(".") for leaf in ("weight", "bias")]
        if names[0] in own:
            yield from ((name, own[name], own[names[0]][0].numel()) for name in names if name in own)


def supermasked(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear and convolutional layers of a module, with their paths.

    Example:
        >>> [path for path, _ in supermasked(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))]
        ['0']
    """
    return ((path, layer) for path, layer in module.named_modules() if isinstance(layer, _LAYERS))


def signed_constant(weight: Tensor, fan_in: int) -> Tensor:
    """Return the signs of a tensor, times ``e / sqrt(fan_in)``; 0 counts as positive.

    Example:
        >>> signed_constant(torch.tensor([0.3, -0.1]), 4)
        tensor([ 1.3591, -1.3591])
    """
    return torch.where(weight >= 0, 1.0, -1.0).to(weight.dtype) * (math.e / math.sqrt(fan_in))


def signed_constants(weights: Weights) -> tuple[str, ...]:
    """Return the names of the tensors that :func:`signed_constant` has made: those of layers, and their biases.

    Example:
        >>> layer = {"a.weight": signed_constant(torch.randn(2, 4), 4), "a.bias": signed_constant(torch.randn(2), 4)}
        >>> signed_constants({**layer, "norm.weight": torch.ones(2), "b.weight": torch.randn(2, 4)})
        ('a.weight', 'a.bias')
    """
    layers = {name: weights[name][0].numel() for name in maskable(weights)}
    layers = {name: fan_in for name, fan_in in layers.items() if _is_constant(weights[name], fan_in)}
    fans = {name.rpartition(".")[0]: fan_in for name, fan_in in layers.items()}

    def is_bias(name: str, value: Tensor) -> bool:
        path, _, leaf = name.rpartition(".")
        return leaf == "bias" and path in fans and _is_constant(value, fans[path])

    return tuple(name for name, value in weights.items() if name in layers or is_bias(name, value))


def _is_constant(value: Tensor, fan_in: int) -> bool:
    """Return whether all numbers have the magnitude of a signed constant, up to the rounding of bfloat16."""
    constant = torch.full_like(value, math.e / math.sqrt(fan_in))
    return torch.allclose(value.abs(), constant, rtol=1e-2, atol=0.0)


def score_gradient(gradient: Tensor, frozen: Tensor, scores: Tensor) -> Tensor:
    """Compute the gradient of scores from that of the masked weights, through ``p = sigmoid(score)``.

    The draw passes the gradient times p, as in the authors' program: ``gradient * frozen * p * p * (1 - p)``.

    Args:
        gradient: Gradient of ``frozen * mask``.
        frozen: Weights that are masked.
        scores: Scores, of their shape.

    Example:
        >>> score_gradient(torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([0.0]))
        tensor([-0.2500])
    """
    p = scores.sigmoid()
    return gradient * frozen * p * p * (1 - p)


def posterior_scores(frequency: Tensor, least: float) -> Tensor:
    """Return ``logit(least + (1 - 2 least) * frequency)``: the scores of the mode of a posterior of clamped bits.

    Example:
        >>> posterior_scores(torch.tensor([0.75, 1.0]), 0.01)
        tensor([1.0721, 4.5951])
    """
    return torch.logit(least + (1 - 2 * least) * frequency)
