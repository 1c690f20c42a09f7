"""A model in groups, of which clients train some."""

from __future__ import annotations

import torch

from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import ClientView

WEIGHTS = {
    "a.weight": torch.ones(2, 5),
    "a.bias": torch.ones(2),
    "b.weight": torch.ones(3, 2),
    "b.mean": torch.zeros(3, 3),
    "c.weight": torch.ones(4, 3),
    "c.bias": torch.ones(4),
    "positions": torch.ones(2, 2),
}
"""Groups of 12 and 6 parameters, a head of 16; `b.mean` and `positions` are buffers."""
BUFFERS = frozenset({"b.mean", "positions"})
A, B, HEAD = {"a.weight", "a.bias"}, {"b.weight"}, {"c.weight", "c.bias"}


def views(*capacities, ids=None, seed=0):
    ids = ids or range(len(capacities))
    facts = {"num_examples": 7, "round": 0, "max_rounds": 5, "seed": seed}
    return [ClientView(id=i, capacity=c, **facts) for i, c in zip(ids, capacities, strict=True)]


def started(method, people):
    return method.init(WEIGHTS, Fleet(people, BUFFERS, torch.device("cpu")))


def frozen(method, people):
    """What each client may not change; frozen throughout."""
    server = started(method, people)
    messages = [method.download(server, view) for view in people]
    assert all(not mask.any() for message in messages for mask in message.trainable.values())
    return [set(message.trainable) for message in messages]
