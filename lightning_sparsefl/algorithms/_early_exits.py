"""What methods for models with early exits share."""

from __future__ import annotations

import torch

from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.exits import blocks_of, exit_heads
from lightning_sparsefl.types import Weights


def places(parameters: Weights, fleet: Fleet) -> dict[str, Weights]:
    """Return the number of the block of each parameter, as ``blocks``, and of the exits' last layers, as ``heads``.

    Args:
        parameters: Parameters of the module by name.
        fleet: All clients.
    """
    found = {
        "blocks": blocks_of(list(parameters), fleet.exits),
        "heads": exit_heads(parameters, fleet.exits, fleet.uses),
    }
    return {key: {name: torch.tensor(block) for name, block in tree.items()} for key, tree in found.items()}


def predicting(weights: Weights, factors: Weights) -> Weights:
    """Return weights with which the module, whose prediction is the mean over all exits, predicts by some of them.

    Args:
        weights: Weights by name.
        factors: Factor of each of the exits' last layers.
    """
    return {
        name: value * factors[name].to(value.dtype) if name in factors else value for name, value in weights.items()
    }
