"""The server's correction of dynamic regularization (FedDyn, arXiv:2111.04263, Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.types import Masks, Weights


def corrected(
    weights: Weights, mean: Weights, h: Weights, voters: Weights, covered: Masks, *, alpha: float, clients: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the next weights and the next h: ``h - alpha (voters / clients) (mean - w)``, and ``mean - h / alpha``.

    A coordinate without a voter keeps its value and its h.

    Args:
        weights: Weights of the server before the round.
        mean: Mean of the clients' weights.
        h: Mean of the clients' gradients at the server, for parameters alone.
        voters: Number of clients that trained each coordinate, or one number for a whole tensor, by name.
        covered: Coordinates that a client trained; all of a missing name.
        alpha: Strength of the regularization, above 0.
        clients: Number of clients of the fleet.

    Example:
        >>> w, mean = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 2.0])}
        >>> corrected(w, mean, {"w": torch.zeros(2)}, {"w": torch.tensor(2)}, {}, alpha=0.5, clients=4)
        ({'w': tensor([1.5000, 3.0000])}, {'w': tensor([-0.2500, -0.5000])})
    """
    after, changed = dict(mean), {}
    for name, before in h.items():
        share = voters[name].to(before) / clients
        changed[name] = before - alpha * share * (mean[name] - weights[name])
        value = mean[name] - changed[name] / alpha
        after[name] = torch.where(covered[name], value, mean[name]) if name in covered else value
    return after, changed
