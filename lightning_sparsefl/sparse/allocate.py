"""Choice of the weights that reduce the loss most for their time.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model pruning enables efficient federated learning on edge devices",
arXiv:1909.12326.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import score_of, shrink
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks, Weights


def best_ratio(values: Tensor, costs: Tensor, base_value: float, base_cost: float) -> Tensor:
    """Return a mask of the items that maximize (base value + sum of values) / (base cost + sum of costs).

    Items are taken in the order of value / cost, as long as that is above the ratio of what has been taken. Of equal
    ones the lower index comes first.

    Args:
        values: Values >= 0, shape ``(n,)``.
        costs: Costs > 0, shape ``(n,)``.
        base_value: Value of what is taken in any case.
        base_cost: Cost of what is taken in any case; with 0 the first item is always taken.

    Returns:
        Bool, ``(n,)``, on the device of `values`.

    Example:
        >>> best_ratio(torch.tensor([0.9, 0.5, 0.2, 0.05]), torch.tensor([1.0, 1.0, 2.0, 0.1]), 1.0, 10.0)
        tensor([ True,  True, False,  True])
    """
    device, values, costs = values.device, values.detach().double().cpu(), costs.detach().double().cpu()
    order = torch.sort(values / costs, descending=True, stable=True).indices  # on a CPU, where sums are reproducible
    gained, spent = values[order], costs[order]
    value, cost = base_value + gained.cumsum(0) - gained, base_cost + spent.cumsum(0) - spent
    better = (gained * cost > value * spent) | (cost <= 0)
    taken = torch.zeros(len(order), dtype=torch.bool)
    taken[order] = better.cummin(0).values
    return taken.to(device)


def reallocate(
    weights: Weights,
    masks: Masks,
    values: Weights,
    seconds: Mapping[str, float],
    fraction: float,
    base_value: float = 0.0,
    base_seconds: float = 0.0,
) -> dict[str, Tensor]:
    """Return masks that keep the largest weights, and of all others those that are worth their time.

    Each mask keeps all but the ``floor(fraction * kept)`` smallest magnitudes; :func:`best_ratio` chooses among the
    other positions, dead ones included.

    Args:
        weights: Weights by name.
        masks: Masks of what is kept now.
        values: Value of each position, such as its squared gradient; same names as `masks`.
        seconds: Time of one weight of each layer.
        fraction: Largest fraction of the kept weights to drop, in [0, 1].
        base_value: Value of weights that have no mask.
        base_seconds: Time that does not depend on the masks.

    Raises:
        IncompatibleMasks: If a mask has no weight or value of its shape.

    Example:
        >>> weights, masks = {"w": torch.tensor([3.0, 1.0, 0.0])}, {"w": torch.tensor([True, True, False])}
        >>> reallocate(weights, masks, {"w": torch.tensor([2.0, 1.0, 4.0])}, {"w": 1.0}, 0.5)
        {'w': tensor([ True, False,  True])}
    """
    left = {name: alive - floor_count(fraction, alive) for name, alive in counts(masks).items()}
    sure = shrink(magnitude(weights), masks, left)
    base_value += sum(float(score_of(values, name, mask)[mask].double().sum()) for name, mask in sure.items())
    base_seconds += sum(seconds[name] * kept for name, kept in left.items())
    rest = {name: ~mask for name, mask in sure.items()}
    worth = torch.cat([values[name][open_] for name, open_ in rest.items()])
    price = torch.cat([torch.full_like(values[name][open_], seconds[name]) for name, open_ in rest.items()])
    taken = best_ratio(worth, price, base_value, base_seconds).split([int(open_.sum()) for open_ in rest.values()])
    return {name: sure[name].masked_scatter(rest[name], part) for name, part in zip(rest, taken, strict=True)}
