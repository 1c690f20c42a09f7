"""The grid that the terms of a sum are rounded to, so that float64 adds them without error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Weights

_HEADROOM = 10
"""Values above 2**10 times the largest server weight of their tensor are not summed on its grid."""
_SMALLEST_SCALE = 2.0**-4
"""Lower bound of a tensor's scale, for tensors that start at zero, such as biases."""
_BITS = 51
"""Sums of terms are at most 2**51 steps, whose multiples float64 represents exactly."""


@dataclass(frozen=True)
class Grid:
    """Step sizes of the terms of one round, one for each tensor of a layout."""

    steps: Sequence[float]
    """Powers of two, in the layout's order; a term is rounded to a multiple of the step of its tensor."""
    total_weight: int
    """Upper bound of the sum of the updates' weights."""
    device: torch.device
    """Device of the sum."""
    too_coarse: bool = False
    """Whether the steps drop bits of the values, as of float64, so that all are summed without the grid."""

    @classmethod
    def of(cls, layout: Layout, server: Weights, total_weight: int) -> Grid:
        """Return the grid that follows from the server's weights.

        Args:
            layout: Layout of the model.
            server: Weights before the round.
            total_weight: Upper bound of the sum of the updates' weights.
        """
        vector = layout.flatten(server)
        largest = torch.stack(
            [piece.abs().max() if piece.numel() else piece.new_zeros(()) for piece in vector.split(layout.sizes)]
        )
        scale = 2.0 ** largest.double().clamp_min(_SMALLEST_SCALE).log2().ceil()
        steps = (scale * 2.0 ** (_HEADROOM - _room(total_weight))).tolist()
        return cls(steps, total_weight, vector.device, too_coarse=layout.dtype == torch.float64)

    @property
    def constants(self) -> list[float]:
        """The number 1.5 * 2**52 * step of each tensor.

        Adding and then subtracting it rounds to multiples of the step in float64, for sums up to 2**51 steps.
        """
        return [1.5 * 2.0**52 * step for step in self.steps]

    @property
    def bounds(self) -> list[float]:
        """The maximum of each tensor's values, of which terms with the total weight are 2**51 steps at most."""
        if self.too_coarse:
            return [0.0] * len(self.steps)
        return [step * 2.0 ** _room(self.total_weight) for step in self.steps]


def _room(total_weight: int) -> int:
    """Return the bits of a term that are left for a value, besides its weight."""
    return _BITS - math.ceil(math.log2(max(total_weight, 2)))
