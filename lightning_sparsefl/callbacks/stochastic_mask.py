"""Training of the probabilities with which fixed weights are kept.

Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse random networks for communication-efficient federated learning", ICLR 2023,
arXiv:2209.15328, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.supermask import score_gradient
from lightning_sparsefl.types import Weights


class StochasticMask(Reparameterized):
    """Trains scores whose sigmoid is the probability that a weight is kept; the weights themselves do not change.

    The module holds ``w * m``, where m is drawn anew after every optimizer step, so that batches whose gradients are
    accumulated see one draw. :func:`~lightning_sparsefl.sparse.supermask.score_gradient` is the gradient of a score.
    Draws depend on the seed, the step and the layer only.

    Args:
        seed: Seed of the draws.
        scores: First scores by name, which determine the layers; None = drawn from a normal distribution.
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.

    Raises:
        InvalidOption: If the base class refuses the module.

    Example:
        >>> StochasticMask(seed=1).scores
        {}
    """

    def __init__(self, seed: int = 0, scores: Weights | None = None, layers: list[str] | str | None = None) -> None:
        super().__init__(layers, scores)
        self.seed, self._steps = seed, 0
        self._frozen: dict[str, Tensor] = {}

    @property
    def scores(self) -> Weights:
        """Scores by name; empty before the first fit, unless they were given."""
        return self.theta

    @property
    def frozen(self) -> Weights:
        """The weights that are masked; empty before the first fit."""
        return self._frozen

    def first(self, name: str, weight: Tensor) -> Tensor:
        """Draw the scores of a layer."""
        return torch.randn(weight.shape, generator=generator(self.seed, "scores", name))

    def started(self) -> None:
        """Store the weights of the first fit, which are those that are masked."""
        for name, weight in self._weights.items():
            frozen = self._frozen.get(name, weight.detach())
            self._frozen[name] = frozen.to(weight.device, weight.dtype, copy=True)

    def shown(self, name: str, theta: Tensor) -> Tensor:
        """Return the weights under the draw of this step."""
        drawn = torch.rand(theta.shape, generator=generator(self.seed, self._steps, "mask", name), dtype=theta.dtype)
        return torch.where(drawn.to(theta.device) < theta.sigmoid(), self._frozen[name], 0.0)

    def slope(self, name: str, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of scores."""
        return score_gradient(gradient, self._frozen[name], theta)

    def stepped(self) -> None:
        """Advance to the next draw."""
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, the weights that are masked, and the number of draws."""
        return super().state_dict() | {"frozen": dict(self._frozen), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scores, the weights and the number of draws of a checkpoint."""
        self._frozen, self._steps = dict(state_dict["frozen"]), state_dict["steps"]
        super().load_state_dict(state_dict)
