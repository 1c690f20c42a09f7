"""Scores of weights, of which the largest stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.types import Weights


def magnitude(weights: Weights) -> dict[str, Tensor]:
    """Return ``|w|`` (Han et al., "Learning both weights and connections", NeurIPS 2015).

    Example:
        >>> magnitude({"w": torch.tensor([-2.0, 1.0])})
        {'w': tensor([2., 1.])}
    """
    return {name: value.detach().abs() for name, value in weights.items()}


def gradient(gradients: Weights) -> dict[str, Tensor]:
    """Return ``|g|``, the score by which RigL regrows (Evci et al., "Rigging the lottery", ICML 2020).

    Example:
        >>> gradient({"w": torch.tensor([-2.0, 1.0])})
        {'w': tensor([2., 1.])}
    """
    return {name: value.detach().abs() for name, value in gradients.items()}


def snip(weights: Weights, gradients: Weights) -> dict[str, Tensor]:
    """Return ``|w * g|``, the sensitivity of the loss to a gate on the weight (Lee et al., "SNIP", arXiv:1810.02340).

    The paper also divides by the sum of all scores, which does not change their order within a tensor or over all
    tensors.

    Args:
        weights: Weights by name.
        gradients: Gradients of the loss by each of `weights`, same shapes; others are ignored.

    Raises:
        IncompatibleMasks: If one of `weights` has no gradient of its shape.

    Example:
        >>> snip({"w": torch.tensor([-2.0, 1.0])}, {"w": torch.tensor([0.5, 3.0])})
        {'w': tensor([1., 3.])}
    """
    return {name: product.abs() for name, product in _products(weights, gradients).items()}


def taylor(weights: Weights, gradients: Weights) -> dict[str, Tensor]:
    """Return ``(w * g) ** 2``, the squared change of the loss without the weight, to first order.

    Molchanov et al., "Importance estimation for neural network pruning", arXiv:1906.10771, eq. 8. Within one batch
    it orders weights as :func:`snip` does; means over batches, and sums over units, differ.

    Args:
        weights: Weights by name.
        gradients: Gradients of the loss by each of `weights`, same shapes; others are ignored.

    Raises:
        IncompatibleMasks: If one of `weights` has no gradient of its shape.

    Example:
        >>> taylor({"w": torch.tensor([-2.0, 1.0])}, {"w": torch.tensor([0.5, 3.0])})
        {'w': tensor([1., 9.])}
    """
    return {name: product.square() for name, product in _products(weights, gradients).items()}


def _products(weights: Weights, gradients: Weights) -> dict[str, Tensor]:
    products = {}
    for name, value in weights.items():
        if name not in gradients:
            raise IncompatibleMasks(f"`{name}` cannot be scored: its gradient is missing.")
        if gradients[name].shape != value.shape:
            shapes = f"{tuple(gradients[name].shape)}, expected {tuple(value.shape)}"
            raise IncompatibleMasks(f"The gradient of `{name}` has shape {shapes}.")
        products[name] = value.detach() * gradients[name].detach()
    return products


def learned(scores: Weights) -> dict[str, Tensor]:
    """Return the values of trained scores without a graph (FedLPS; Ramanujan et al., "What's hidden", CVPR 2020).

    What picks a mask has no gradient; :func:`straight_through` gives one to the scores.

    Args:
        scores: Score parameters, one a weight or one a unit.

    Raises:
        IncompatibleMasks: If a score is not finite, so that it has no rank.

    Example:
        >>> learned({"w": torch.nn.Parameter(torch.tensor([0.5, -1.0]))})
        {'w': tensor([ 0.5000, -1.0000])}
    """
    for name, value in scores.items():
        if not bool(torch.isfinite(value).all()):
            raise IncompatibleMasks(f"A learned score of `{name}` is not finite; lower the scores' learning rate.")
    return {name: value.detach() for name, value in scores.items()}


def straight_through(score: Tensor, mask: Tensor) -> Tensor:
    """Return the mask as numbers whose gradient passes to the score unchanged.

    Bengio et al., "Estimating or propagating gradients through stochastic neurons", arXiv:1308.3432. In
    ``w * straight_through(score, mask)`` the score has the gradient ``w * dL/d(w * mask)``, also where it is dropped,
    so that what was dropped may return.

    Args:
        score: Finite scores of any shape.
        mask: Bool tensor of the same shape, for example of the largest scores.

    Returns:
        Exactly 0 and 1, of the score's type.

    Example:
        >>> score = torch.tensor([0.3, -0.2], requires_grad=True)
        >>> gate = straight_through(score, torch.tensor([True, False]))
        >>> (torch.tensor([5.0, 7.0]) * gate).sum().backward()
        >>> gate.tolist(), score.grad.tolist()
        ([1.0, 0.0], [5.0, 7.0])
    """
    return mask.to(score.dtype) + (score - score.detach())  # exactly the mask, since x - x is 0


def random(shapes: Mapping[str, Sequence[int] | Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Draw uniform scores from [0, 1), tensor by tensor in the order of `shapes`.

    Args:
        shapes: Shapes by name, or tensors of these shapes, on whose devices the scores are.
        generator: Generator of the draws; scores of a shape are on its device.

    Example:
        >>> scores = random({"w": (2, 3)}, torch.Generator().manual_seed(0))
        >>> scores["w"].shape, bool((scores["w"] < 1).all())
        (torch.Size([2, 3]), True)
    """
    device, drawn = generator.device if generator is not None else None, {}
    for name, like in shapes.items():
        shape = tuple(like.shape) if isinstance(like, Tensor) else tuple(like)
        score = torch.rand(shape, generator=generator, device=device)
        drawn[name] = score.to(like.device) if isinstance(like, Tensor) else score
    return drawn
