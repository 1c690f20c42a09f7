"""Gradients of several clients, as hooks of the module see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sparsefl.federated.local.stacked import functorch


class Gradients:
    """Gradients of the weights of several clients, as code of the module sees them within a level.

    Args:
        weights: Weights by name, as the module sees them.
        leaves: Weights of all clients by name, whose gradients are seen.
        level: Number of the level.
    """

    def __init__(self, weights: Mapping[str, Tensor], leaves: Mapping[str, Tensor], level: int) -> None:
        self._weights, self._leaves = weights, leaves
        slopes = {name: leaves[name].grad for name in weights}
        self._seen: dict[int, Tensor | None] = {
            id(weight): None if (slope := slopes[name]) is None else functorch.wrap(slope.detach(), 0, level)
            for name, weight in weights.items()
        }
        self._replaced: dict[int, Tensor] = {}
        """Gradients of all clients that have been assigned, by the identity of the weight."""

    def knows(self, tensor: Any) -> bool:
        """Return whether a tensor is one of the weights."""
        return id(tensor) in self._seen

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the gradient of a weight.

        Args:
            weight: Weight, as the module sees it.
        """
        return self._seen[id(weight)]

    def replace(self, weight: Tensor, seen: Tensor, slopes: Tensor) -> None:
        """Replace the gradient of a weight, which has one.

        Args:
            weight: Weight, as the module sees it.
            seen: Gradient, as the module sees it.
            slopes: Gradient of all clients.
        """
        self._seen[id(weight)], self._replaced[id(weight)] = seen, slopes

    def store(self) -> bool:
        """Give the weights of all clients the gradients that have been assigned, and return whether there are any.

        They are not copied, since the module may keep them too, as a momentum, and later changes of gradients are to
        reach what it keeps.
        """
        for name, weight in self._weights.items():
            slopes = self._replaced.get(id(weight))
            if slopes is not None:
                self._leaves[name].grad = slopes
        return bool(self._replaced)
