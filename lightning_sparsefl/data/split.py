"""A data set in memory that is divided over clients, ordered by client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Part: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True, kw_only=True)
class SplitData:
    """Split data set, ordered by client, so that the examples of a client are a view and not a copy.

    The examples of a client end at its entry of `*_stops`, and start where those of the previous client end.
    """

    train: Part
    train_stops: Tensor
    val: Part
    val_stops: Tensor | None
    test: Part
    test_indices: Tensor
    test_stops: Tensor


def stops(parts: Sequence[Tensor]) -> Tensor:
    """Return where the examples of each client end.

    Args:
        parts: Indices of the examples of each client.
    """
    return torch.tensor([len(part) for part in parts]).cumsum(0)


def span(stops: Tensor, client: int) -> tuple[int, int]:
    """Return where the examples of a client start and end.

    Args:
        stops: Ends of all clients.
        client: Number of the client.

    Example:
        >>> span(torch.tensor([3, 5]), 0), span(torch.tensor([3, 5]), 1)
        ((0, 3), (3, 5))
    """
    return int(stops[client - 1]) if client else 0, int(stops[client])
