"""The server's correction of dynamic regularization, which FedDyn and DepthFL have in common.

The state has ``h``, the mean of the clients' estimates of their gradients, and the number of clients.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_sparsefl.sparse.dynamic_regularization import corrected
from lightning_sparsefl.types import Merged, ServerState

NEEDS_EXACT_MEAN = "corrects the mean of the updates by what clients keep of these as they sent them"
"""Clause of an error for options that change the mean: h would no longer be the mean of the clients' estimates."""


def with_correction(server: ServerState, mean: ServerState, merged: Merged, alpha: float) -> ServerState:
    """Return the state after a round: the mean minus h / alpha, with the next h.

    Args:
        server: State before the round.
        mean: State with the mean of the clients' weights.
        merged: Merged updates of the round.
        alpha: Strength of the regularization, above 0.
    """
    everyone, h = torch.tensor(merged.clients), server.extra["h"]
    weights, changed = corrected(
        server.weights,
        mean.weights,
        h,
        {name: merged.voters.get(name, everyone) for name in h},
        merged.covered,
        alpha=alpha,
        clients=int(server.extra["fleet"]["clients"]),
    )
    return replace(mean, weights=weights, extra={**mean.extra, "h": changed})
