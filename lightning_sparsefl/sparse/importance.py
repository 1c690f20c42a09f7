"""Importance of units as scores that are trained.

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section 3. A
unit's score Q is the strength of a gate on its output h, after norm and activation; the gate itself is open or closed,
and its gradient is taken straight through: ``dL/dQ = sum of h * dL/dh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_sparsefl.sparse.units import Slot, UnitGroup, check_kept
from lightning_sparsefl.types import Masks, Weights

Reduction = Literal["sum", "mean"]
"""How squares are combined: their sum, or the mean over each group's units, summed over groups."""


def relative(norms: Weights) -> dict[str, Tensor]:
    """Return ``sigmoid(|w|_J / mean of its group)``, in [.5, 1); keeps gradients.

    Args:
        norms: Norms of units from :func:`~lightning_sparsefl.sparse.units.unit_norms`.

    Example:
        >>> relative({"conv": torch.tensor([0.0, 2.0])})
        {'conv': tensor([0.5000, 0.8808])}
    """
    return {n: torch.sigmoid(v / v.mean().clamp_min(torch.finfo(v.dtype).tiny)) for n, v in norms.items()}


def gate_gradients(groups: Sequence[UnitGroup], weights: Weights, gradients: Weights) -> dict[str, Tensor]:
    """Compute ``sum of h * dL/dh`` for each unit's output h, over samples, places and readers.

    It need not be measured at h: a reader computes ``W h``, so that over a unit's incoming slice of W
    ``sum of W * dL/dW = sum of h * dL/dh`` (Euler). The weights' gradients are computed anyway, and are already
    summed over accumulated batches and processes.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        weights: Weights at which the gradients were taken; zero where masked.
        gradients: Gradients of the loss; a layer that is missing, since it is frozen, does not count.

    Returns:
        For each group, ``(units,)``; exactly 0 for a unit that was masked.

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
                product = (weights[slot.name].detach() * gradients[slot.name]).movedim(slot.dim, 0).flatten(1).sum(1)
                own = product[slot.positions.to(product.device)].sum(1)
                found[group.name] = found[group.name] + own if group.name in found else own
    return found


def tie(scores: Weights, norms: Weights, reduction: Reduction = "sum") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the gradients of ``||Q - sigmoid(|w|_J / layer mean)||^2``, which ties scores and magnitudes.

    Args:
        scores: Scores Q of each group.
        norms: Norms of units from :func:`~lightning_sparsefl.sparse.units.unit_norms`.
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
        mean, factor = norm.mean(), 1.0 if reduction == "sum" else 1 / len(norm)
        own[name] = 2 * (scores[name].detach() - target) * factor
        inner, unit = -own[name] * (1 - target) * target, mean.clamp_min(tiny)
        shared = -(inner * (norm / unit / unit)).sum() / len(norm)  # the mean depends on each norm
        lengths[name] = inner / unit + torch.where(mean >= tiny, shared, 0)
    return own, lengths


def row_gradients(groups: Sequence[UnitGroup], gradients: Weights, weights: Weights) -> dict[str, Tensor]:
    """Compute the gradients of the weights in outgoing rows from those of the norms that they add up to.

    Args:
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        gradients: Gradients of the norms of each group, ``(units,)``.
        weights: Weights of the model; one that is zero, as where it is masked, gets no gradient.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> weights = {"0.weight": torch.tensor([[1.0, -2.0], [0.0, 5.0]])}
        >>> row_gradients(find_groups(net, torch.zeros(1, 2)), {"0": torch.tensor([1.0, 3.0])}, weights)
        {'0.weight': tensor([[ 1., -1.],
                [ 0.,  3.]])}
    """
    found: dict[str, Tensor] = {}
    for group in groups:
        for slot in group.slots:
            if slot.name not in weights or not _is_row(group, slot, weights[slot.name]):
                continue
            weight, places = weights[slot.name].detach(), slot.positions.to(gradients[group.name].device)
            line = weight.new_zeros(weight.shape[slot.dim])
            line[places] = gradients[group.name].to(line.dtype)[:, None].expand(places.shape)
            own = weight.sign() * line.view([-1 if dim == slot.dim else 1 for dim in range(weight.dim())])
            found[slot.name] = found[slot.name] + own if slot.name in found else own
    return found


def _is_row(group: UnitGroup, slot: Slot, weight: Tensor) -> bool:
    return slot.role == "out" and slot.name.rpartition(".")[0] in group.layers and weight.dim() > 1


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
