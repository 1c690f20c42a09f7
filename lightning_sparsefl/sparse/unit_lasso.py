"""Group lasso over units: a penalty on the norm of each unit's weights, which drives whole units to zero.

Lym et al., "PruneTrain: fast neural network training by dynamic sparse model reconfiguration", SC 2019,
arXiv:1901.09290, eq. 1. The groups are the output channels and the input channels of every layer, where the next layers
read a unit. Biases and norms are in no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparsefl.sparse.importance import narrow_groups
from lightning_sparsefl.sparse.moments import wide
from lightning_sparsefl.sparse.units import Slot, UnitGroup, spread_over_slot, sum_by_unit
from lightning_sparsefl.types import Masks, Weights

EPSILON = 1e-8
"""Added to squared norms, so that the penalty has a gradient at zero."""


def lasso_slots(groups: Sequence[UnitGroup], weights: Weights, leading: int = 0) -> Iterator[Slot]:
    """Yield the slots of units in tensors of two or more dimensions: outgoing rows and incoming slices.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights of the model.
        leading: Number of leading dimensions of the weights, which do not count.
    """
    for group in groups:
        for slot in group.slots:
            if slot.role != "buffer" and slot.name in weights and weights[slot.name].dim() - leading > 1:
                yield slot


def unit_lengths(slot: Slot, weight: Tensor, leading: int = 0) -> Tensor:
    """Return ``sqrt(sum w^2 + 1e-8)`` over the weights of each unit in one tensor, of shape ``(..., units)``.

    Weights in float16 and bfloat16 have lengths in float32: their squares leave the range of float16, where 1e-8 is 0.

    Args:
        slot: Positions of the units in the tensor.
        weight: The tensor.
        leading: Number of leading dimensions of the tensor, which are kept.
    """
    return (sum_by_unit(slot, wide(weight).square(), leading) + EPSILON).sqrt()


def unit_lasso(groups: Sequence[UnitGroup], weights: Weights) -> Tensor:
    """Return the sum of the norms of all units' rows and incoming slices.

    Args:
        groups: Groups of units.
        weights: Weights of the model.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1))
        >>> weights = {"0.weight": torch.tensor([[3.0, 4.0], [0.0, 5.0]]), "1.weight": torch.tensor([[1.0, 2.0]])}
        >>> round(float(unit_lasso(find_groups(net, torch.zeros(1, 2)), weights)), 4)
        13.0
    """
    norms = [unit_lengths(slot, weights[slot.name].detach()).sum() for slot in lasso_slots(groups, weights)]
    return torch.stack(norms).sum() if norms else torch.zeros(())


def unit_lasso_gradients(groups: Sequence[UnitGroup], weights: Weights, leading: int = 0) -> dict[str, Tensor]:
    """Return the gradient of :func:`unit_lasso`: each weight over the norms of the one or two groups that it is in.

    Args:
        groups: Groups of units.
        weights: Weights of the model.
        leading: Number of leading dimensions of the weights, such as 1 for those of several clients.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1))
        >>> weights = {"0.weight": torch.tensor([[3.0, 4.0], [0.0, 5.0]]), "1.weight": torch.tensor([[1.0, 2.0]])}
        >>> unit_lasso_gradients(find_groups(net, torch.zeros(1, 2)), weights)
        {'0.weight': tensor([[0.6000, 0.8000],
                [0.0000, 1.0000]]), '1.weight': tensor([[1., 1.]])}
    """
    gradients: dict[str, Tensor] = {}
    for slot in lasso_slots(groups, weights, leading):
        weight = weights[slot.name].detach()
        exact = wide(weight)
        own = exact * spread_over_slot(slot, 1 / unit_lengths(slot, weight, leading), exact, 0.0)
        gradients[slot.name] = gradients[slot.name] + own if slot.name in gradients else own
    return {name: gradient.to(weights[name].dtype) for name, gradient in gradients.items()}


def present_groups(
    groups: Sequence[UnitGroup], kept: Masks, weights: Weights, parameters: Weights
) -> Sequence[UnitGroup]:
    """Return the groups of a module that is either the full model or the narrow one with the kept units.

    Args:
        groups: Groups of units of the full model.
        kept: Units of each group that the narrow model has.
        weights: Weights of the full model.
        parameters: Parameters of the module.
    """
    if all(weights[name].shape == value.shape for name, value in parameters.items() if name in weights):
        return groups
    return narrow_groups(groups, kept, weights)
