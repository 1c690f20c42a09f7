"""Training of the weights whose magnitudes reach a threshold.

Wu et al., "FIARSE: Model-heterogeneous federated learning via importance-aware submodel extraction", NeurIPS 2024,
arXiv:2407.19389, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsefl.callbacks.options import require
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.sparse.reparameterize import gate, gate_slope
from lightning_sparsefl.types import Weights


class MagnitudeGate(Reparameterized):
    """Trains ``w * [|w| >= threshold]`` with thresholds that do not change.

    A weight that falls below the threshold in training is 0 in the model from there on, gets no gradient and keeps its
    value: momentum and weight decay do not move it either. Gradients of the others are multiplied by
    :func:`~lightning_sparsefl.sparse.reparameterize.gate_slope`, as if the gate depended on the magnitude smoothly.

    Args:
        thresholds: Thresholds >= 0 by layer, or one for all.
        boost: Whether gradients are multiplied by that factor.
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        theta: Weights by name to start from, which determine the layers; None = the module's own.

    Raises:
        InvalidOption: If a threshold is negative, or the base class refuses the module.

    Example:
        >>> MagnitudeGate(0.1).boost
        True
    """

    def __init__(
        self,
        thresholds: Mapping[str, float] | float,
        boost: bool = True,
        layers: list[str] | str | None = None,
        theta: Weights | None = None,
    ) -> None:
        values = thresholds.values() if isinstance(thresholds, Mapping) else [thresholds]
        require(all(value >= 0 for value in values), "MagnitudeGate", "thresholds", thresholds, "numbers >= 0")
        super().__init__(layers, theta)
        self.thresholds, self.boost = thresholds, boost

    def _threshold(self, name: str) -> float:
        return self.thresholds[name] if isinstance(self.thresholds, Mapping) else self.thresholds

    def shown(self, name: str, theta: Tensor) -> Tensor:
        """Return the weights that reach the threshold, and zeros."""
        return torch.where(gate(theta, self._threshold(name)), theta, 0.0)

    def slope(self, name: str, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradients of the weights that reach the threshold."""
        threshold = self._threshold(name)
        factor = gate_slope(theta, threshold) if self.boost else 1.0
        return torch.where(gate(theta, threshold), gradient * factor, 0.0)

    def settled(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Put back the weights below the threshold, which momentum and decay have moved."""
        return torch.where(gate(before, self._threshold(name)), after, before)
