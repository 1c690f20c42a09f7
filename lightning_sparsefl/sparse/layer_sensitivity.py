"""Sensitivity of a module to the pruning of single layers.

Li et al., "Pruning Filters for Efficient ConvNets", arXiv:1608.08710, section 3.2: each layer is pruned independently,
and the pruned module is scored. Layers whose score falls early should stay denser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import ceil_count, maskable
from lightning_sparsefl.sparse.parametrized import changes_zeros
from lightning_sparsefl.sparse.prune import keep_largest
from lightning_sparsefl.sparse.units import UnitGroup, keep_units, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.types import Masks


@dataclass(frozen=True)
class Sensitivity:
    """Scores of a module with one layer pruned at a time; ``str`` gives a table."""

    dense: float
    """Score of the module as it is."""
    densities: tuple[float, ...]
    """Densities of the pruned layer."""
    scores: Mapping[str, tuple[float, ...]]
    """For each layer, or group of units, the score at each density."""

    def __str__(self) -> str:
        """Return a table with a row for each layer."""
        width = max(map(len, ("layer", *self.scores)))
        lines = [f"{'layer':<{width}}" + "".join(f" {density:>8g}" for density in self.densities)]
        lines += [f"{name:<{width}}" + "".join(f" {s:>8.4f}" for s in row) for name, row in self.scores.items()]
        return "\n".join([*lines, f"{'dense':<{width}} {self.dense:>8.4f}"])


def sensitivity(
    module: nn.Module,
    evaluate: Callable[[nn.Module], float],
    densities: Sequence[float] = (0.5, 0.2, 0.1, 0.05),
    *,
    layers: str | Sequence[str] = "*",
    groups: Sequence[UnitGroup] | None = None,
) -> Sensitivity:
    """Score a module with one layer at a time pruned by magnitude, without training.

    The module is changed in place for each score and has its own weights again at the end, after an error too.
    Parameters from which a parametrization such as weight norm computes a weight with other zeros are left out, since
    they cannot be masked.

    Args:
        module: Module to score.
        evaluate: Function of the module that returns its score, such as its accuracy on validation data. It is
            called without gradients, and decides about evaluation mode.
        densities: Fractions of the layer's weights, or of the group's units, that are kept, in (0, 1].
        layers: Glob, or several, over the names of parameters of two or more dimensions, or of groups.
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`, whose smallest units are
            dropped as a whole, as :func:`~lightning_sparsefl.sparse.unit_removal.shrink` removes them. Default: single
            weights are dropped.

    Raises:
        InvalidOption: If a density is outside (0, 1], or `layers` matches nothing.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = net[0].weight.copy_(torch.tensor([[4.0, 0.0], [0.0, 1.0]])), net[1].weight.fill_(1.0)
        >>> print(sensitivity(net, lambda net: net(torch.ones(1, 2)).item(), densities=[0.5, 0.25]))
        layer         0.5     0.25
        0.weight   5.0000   4.0000
        1.weight   4.0000   4.0000
        dense      5.0000
    """
    for density in densities:
        if not 0 < density <= 1:
            raise InvalidOption(f"`densities={list(densities)}`: expected numbers in (0, 1], got {density}.")
    patterns = [layers] if isinstance(layers, str) else list(layers)
    known = [group.name for group in groups] if groups is not None else _matrices(module)
    chosen = [name for name in known if any(fnmatch(name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(f"`{name}`" for name in known) or "(none)"
        raise InvalidOption(f"`layers={layers!r}` matches no layer; expected one or more of {names}.")
    dense = _score(module, evaluate, {})
    scores = {
        name: tuple(_score(module, evaluate, _pruned(module, name, density, groups)) for density in densities)
        for name in chosen
    }
    return Sensitivity(dense, tuple(densities), scores)


def _matrices(module: nn.Module) -> list[str]:
    """Return the names of the parameters that can be masked."""
    real = {name: value for name, value in module.named_parameters() if value.is_floating_point()}
    return [name for name in maskable(real) if changes_zeros(module, name) is None]


def _pruned(module: nn.Module, name: str, density: float, groups: Sequence[UnitGroup] | None) -> Masks:
    """Return the masks of a module of which one layer is pruned."""
    weights: dict[str, Tensor] = {key: value.detach() for key, value in module.named_parameters()}
    if groups is None:
        return {name: keep_largest(weights[name].abs(), ceil_count(density, weights[name].numel()))}
    group = [group for group in groups if group.name == name]
    kept = keep_units(unit_norms(group, weights), unit_counts(group, density))
    return unit_masks(group, {key: units.cpu() for key, units in kept.items()}, weights)


@torch.no_grad()
def _score(module: nn.Module, evaluate: Callable[[nn.Module], float], masks: Masks) -> float:
    """Score a module under masks, and give it its weights back."""
    weights = {name: module.get_parameter(name) for name in masks}
    before = {name: weight.clone() for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            weight.mul_(masks[name])
        return float(evaluate(module))
    finally:
        for name, weight in weights.items():
            weight.copy_(before[name])
