"""Importance of units as scores that are trained.

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section 3. A
unit's score Q is the strength of a gate on its output h, after norm and activation; the gate itself is open or closed,
and its gradient is taken straight through: ``dL/dQ = sum of h * dL/dh``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsefl.sparse.units import UnitGroup, check_kept, is_row, spread_over_slot, sum_by_unit
from lightning_sparsefl.types import Masks, Weights

Reduction = Literal["sum", "mean"]
"""How squares are combined: their sum, or the mean over each group's units, summed over groups."""


def relative(norms: Weights) -> dict[str, Tensor]:
    """Return ``sigmoid(|w|_J / mean of its group)``, in [.5, 1); keeps gradients.

    Args:
        norms: Norms of units from :func:`~lightning_sparsefl.sparse.units.unit_norms`, ``(..., units)``.

    Example:
        >>> relative({"conv": torch.tensor([0.0, 2.0])})
        {'conv': tensor([0.5000, 0.8808])}
    """
    means = {name: norm.mean(-1, keepdim=True).clamp_min(torch.finfo(norm.dtype).tiny) for name, norm in norms.items()}
    # `torch.sigmoid` rounds otherwise in the last elements of a tensor on a CPU, which in a stack are other ones
    return {name: 1 / (1 + torch.exp(-norm / means[name])) for name, norm in norms.items()}


def gate_gradients(
    groups: Sequence[UnitGroup], weights: Weights, gradients: Weights, leading: int = 0
) -> dict[str, Tensor]:
    """Compute ``sum of h * dL/dh`` for each unit's output h, over samples, places and readers.

    It need not be measured at h: a reader computes ``W h``, so that over a unit's incoming slice of W
    ``sum of W * dL/dW = sum of h * dL/dh`` (Euler). The weights' gradients are computed anyway, and are already
    summed over accumulated batches and processes.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights at which the gradients were taken; zero where masked.
        gradients: Gradients of the loss; a layer that is missing, since it is frozen, does not count.
        leading: Number of leading dimensions of weights and gradients, such as 1 for those of several clients.

    Returns:
        For each group, ``(..., units)``; exactly 0 for a unit that was masked.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        >>> weights, slopes = {"1.weight": torch.tensor([[2.0, 3.0]])}, {"1.weight": torch.tensor([[1.0, -1.0]])}
        >>> gate_gradients(find_groups(net, torch.zeros(1, 1)), weights, slopes)
        {'0': tensor([ 2., -3.])}
    """
    found: dict[str, Tensor] = {}
    for group in groups:
        for slot in group.slots:
            if slot.role == "in" and slot.name in gradients:
                own = sum_by_unit(slot, weights[slot.name].detach() * gradients[slot.name], leading)
                found[group.name] = found[group.name] + own if group.name in found else own
    return found


def tie(scores: Weights, norms: Weights, reduction: Reduction = "sum") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the gradients of ``||Q - sigmoid(|w|_J / layer mean)||^2``, which ties scores and magnitudes.

    Args:
        scores: Scores Q of each group, ``(..., units)``.
        norms: Norms of units from :func:`~lightning_sparsefl.sparse.units.unit_norms`, of the same shapes.
        reduction: ``"sum"``: sum over all units. ``"mean"``: mean over each group's units, summed over groups.

    Returns:
        For each group, the gradients for Q and for the norms.

    Example:
        >>> tie({"conv": torch.tensor([1.0, 0.7310586])}, {"conv": torch.tensor([3.0, 3.0])})[0]
        {'conv': tensor([0.5379, 0.0000])}
    """
    own, lengths = {}, {}
    for name, target in relative({name: norms[name].detach() for name in scores}).items():
        norm, tiny = norms[name].detach(), torch.finfo(target.dtype).tiny
        mean, factor = norm.mean(-1, keepdim=True), 1.0 if reduction == "sum" else 1 / norm.shape[-1]
        own[name] = 2 * (scores[name].detach() - target) * factor
        inner, unit = -own[name] * (1 - target) * target, mean.clamp_min(tiny)
        shared = -(inner * (norm / unit / unit)).sum(-1, keepdim=True) / norm.shape[-1]  # each norm is in the mean
        lengths[name] = inner / unit + torch.where(mean >= tiny, shared, 0)
    return own, lengths


def add_row_gradients(
    groups: Sequence[UnitGroup], gradients: Weights, weights: Weights, into: Mapping[str, Tensor]
) -> None:
    """Add the gradients of the weights in outgoing rows, from those of the norms that they add up to, to others.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        gradients: Gradients of the norms of each group, ``(..., units)``; a group that is missing adds nothing.
        weights: Weights of the model, with the same leading dimensions; one that is zero, as where it is masked, gets
            no gradient.
        into: Gradients of some weights, which are changed.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> weights, slopes = {"0.weight": torch.tensor([[1.0, -2.0], [0.0, 5.0]])}, {"0.weight": torch.ones(2, 2)}
        >>> add_row_gradients(find_groups(net, torch.zeros(1, 2)), {"0": torch.tensor([1.0, 3.0])}, weights, slopes)
        >>> slopes
        {'0.weight': tensor([[2., 0.],
                [1., 4.]])}
    """
    for group in (group for group in groups if group.name in gradients):
        of_norms = gradients[group.name]
        for slot in group.slots:
            if slot.name in into and is_row(group, slot, into[slot.name].dim() - of_norms.dim() + 1):
                weight = weights[slot.name].detach()
                into[slot.name].addcmul_(weight.sign(), spread_over_slot(slot, of_norms.to(weight.dtype), weight, 0.0))


def narrow_groups(groups: Sequence[UnitGroup], kept: Masks, weights: Weights) -> tuple[UnitGroup, ...]:
    """Return the groups of the model that :func:`~lightning_sparsefl.sparse.submodel.cut` makes.

    Args:
        groups: Groups of units of the full model.
        kept: Units of each group that stay, bool, ``(units,)``; a group that is missing stays whole.
        weights: Weights of the full model.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))
        >>> groups = find_groups(net, torch.zeros(1, 1))
        >>> small = narrow_groups(groups, {"0": torch.tensor([False, True, True])}, net.state_dict())
        >>> small[0].size, small[0].slots[0].positions.tolist()
        (2, [[0], [1]])
    """
    check_kept(groups, kept)
    whole = {group.name: torch.ones(group.size, dtype=torch.bool) for group in groups}
    stay = {name: kept.get(name, everything).cpu() for name, everything in whole.items()}
    left: dict[tuple[str, int], Tensor] = {}
    for group in groups:
        for slot in group.slots:
            if slot.name in weights:
                size = weights[slot.name].shape[slot.dim]
                line = left.setdefault((slot.name, slot.dim), torch.ones(size, dtype=torch.bool))
                line[slot.positions[~stay[group.name]]] = False
    places = {key: line.long().cumsum(0) - 1 for key, line in left.items()}
    return tuple(
        replace(
            group,
            size=int(stay[group.name].sum()),
            slots=tuple(
                replace(slot, positions=places[slot.name, slot.dim][slot.positions[stay[group.name]]])
                for slot in group.slots
                if slot.name in weights
            ),
        )
        for group in groups
    )
