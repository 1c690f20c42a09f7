"""How much each weight matters; the largest scores stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsefl.types import Weights


def magnitude(weights: Weights) -> dict[str, Tensor]:
    """``|w|`` (Han et al., "Learning both weights and connections", NeurIPS 2015).

    Example:
        >>> magnitude({"w": torch.tensor([-2.0, 1.0])})
        {'w': tensor([2., 1.])}
    """
    return {name: value.detach().abs() for name, value in weights.items()}


def gradient(gradients: Weights) -> dict[str, Tensor]:
    """``|g|``, the score by which RigL regrows (Evci et al., "Rigging the lottery", ICML 2020).

    Example:
        >>> gradient({"w": torch.tensor([-2.0, 1.0])})
        {'w': tensor([2., 1.])}
    """
    return {name: value.detach().abs() for name, value in gradients.items()}


def random(shapes: Mapping[str, Sequence[int] | Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Uniform draws from [0, 1), tensor by tensor in the order of `shapes`.

    Args:
        shapes: Named shapes, or tensors that stand for theirs.
        generator: Where the draws come from; the scores lie on its device.

    Example:
        >>> scores = random({"w": (2, 3)}, torch.Generator().manual_seed(0))
        >>> scores["w"].shape, bool((scores["w"] < 1).all())
        (torch.Size([2, 3]), True)
    """
    device = generator.device if generator is not None else None
    plain = {name: tuple(s.shape) if isinstance(s, Tensor) else tuple(s) for name, s in shapes.items()}
    return {name: torch.rand(shape, generator=generator, device=device) for name, shape in plain.items()}
