"""What methods share in which each client searches for its own mask, by dropping weights and growing others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from lightning_sparsefl.cost import forward_flops
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import Shapes, erk, kept_counts, maskable, uniform
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import prune, random_masks
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.sparse.scores import gradient, magnitude, random
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Masks, Weights

LayerDensity = Literal["erk", "uniform"]
"""Distribution of a density over layers."""
Growth = Literal["gradient", "random"]
"""Criterion for growing weights."""
MaskInit = Literal["same", "different"]
"""Whether all clients start from the same mask or from different ones."""
MaskPool = Literal["weights", "all"]
"""Masked tensors: those of two or more dimensions, or every parameter."""
LayerCounts = Callable[[Masks], Mapping[str, int]]
"""Function that returns the number of weights that each layer keeps, given masks of the same shapes."""


def masked_shapes(weights: Weights, fleet: Fleet, pool: MaskPool) -> Shapes:
    """Return the shapes of the tensors that have masks.

    Args:
        weights: Initial weights of the module.
        fleet: All clients.
        pool: Which parameters have masks.
    """
    parameters = fleet.trained(weights)
    names = maskable(parameters) if pool == "weights" else tuple(parameters)
    return {name: weights[name].shape for name in names}


def layer_counts(shapes: Shapes, density: float, layers: LayerDensity) -> dict[str, int]:
    """Return the number of weights that each layer keeps.

    Args:
        shapes: Shapes of the masked tensors.
        density: Fraction of all their weights that is kept.
        layers: Distribution of the density over layers.
    """
    return kept_counts(shapes, (erk if layers == "erk" else uniform)(shapes, density))


def own_masks(first: Masks, view: ClientView, start: MaskInit, purpose: str, kept: LayerCounts = counts) -> Masks:
    """Return the masks that a client uploaded last, or its first ones, which are equal on every machine.

    Args:
        first: Masks that all clients start from, or whose shapes and devices their own have.
        view: View of the client.
        start: Whether all clients start from the same masks or from different ones.
        purpose: Name of the draw of the client's own masks.
        kept: Number of weights that each of these keeps. Default: that of `first`.
    """
    if "masks" in view.shared:
        return dict(view.shared["masks"])
    if start == "same":
        return first
    shapes = {name: mask.shape for name, mask in first.items()}
    drawn = random_masks(shapes, kept(first), generator(view.seed, view.id, purpose))  # on the CPU
    return {name: mask.to(first[name].device) for name, mask in drawn.items()}


def searched(trained: Weights, masks: Masks, rate: float, growth: Growth, client: Client) -> Masks:
    """Drop the smallest weights of each layer, then grow the same number by another score.

    Args:
        trained: Weights of the client after training.
        masks: Masks that it was trained under.
        rate: Fraction of a layer's kept weights that is exchanged.
        growth: Criterion for growing: the size of the dense gradient on one batch, or chance.
        client: The client.

    Returns:
        Masks that keep as many weights of each layer.
    """
    if rate == 0:
        return masks
    kept = prune(magnitude({name: trained[name] for name in masks}), masks, rate)
    if growth == "gradient":
        scores = gradient({name: g for name, g in client.gradient(trained).items() if name in masks})
    else:
        scores = random(masks, client.rng("growth"))
    return regrow(scores, kept, {name: int(mask.sum()) for name, mask in masks.items()})


def with_search(costs: Costs, facts: CostFacts, by_gradient: bool) -> Costs:
    """Add the FLOPs of a search: a dense pass over one batch, forward and backward.

    Args:
        costs: Costs without the search.
        facts: Facts that the costs depend on.
        by_gradient: Whether the round searches by the gradient; the papers' formula includes the pass in any case.
    """
    dense = 3 * forward_flops(facts.layers)
    return replace(
        costs,
        flops_paper=costs.flops_paper + facts.batch_size * dense,
        flops_analytic=costs.flops_analytic + by_gradient * min(facts.batch_size, facts.samples) * dense,
    )
