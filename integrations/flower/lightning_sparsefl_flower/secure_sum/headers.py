"""Headers of sums without a grid, as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeader, SumHeaders
from lightning_sparsefl.federated.exchange.encoding import is_text

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused

_TOPS = range(-33, 4)
"""Highest places of sums, in steps of 32 bits."""
_MOST_DIMENSIONS = 64


def plain_headers(headers: SumHeaders) -> dict[str, Any]:
    """Return headers as nested lists and mappings.

    Args:
        headers: Headers by key of the `extra` tree and by name of the tensor.
    """
    return {key: {name: [list(h.shape), h.top] for name, h in tree.items()} for key, tree in headers.items()}


def read_headers(plain: Any, most: int) -> dict[str, dict[str, SumHeader]]:
    """Return the headers of plain values.

    Args:
        plain: Values from :func:`plain_headers`.
        most: Largest number of elements of all tensors together.

    Raises:
        SecureSumRefused: If they are something else, or more.
    """
    try:
        found = {key: {name: _header(*item, most) for name, item in tree.items()} for key, tree in plain.items()}
    except (TypeError, ValueError, AttributeError):
        raise SecureSumRefused(
            f"A client or the server states extra trees that have no places, or no shapes of at most {most} elements."
        ) from None
    if not all(map(is_text, [*found, *(name for tree in found.values() for name in tree)])):
        raise SecureSumRefused("A client or the server states extra trees with names that are no text.")
    total = sum(_volume(header.shape) for tree in found.values() for header in tree.values())
    if total > most:
        raise SecureSumRefused(f"The extra trees of a secure sum have {total} elements; expected at most {most}.")
    return found


def _header(shape: Any, top: Any, most: int) -> SumHeader:
    fits = len(shape) <= _MOST_DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)
    if not fits or _volume(shape) > most:
        raise ValueError(shape)
    if top is not None and (type(top) is not int or top not in _TOPS):
        raise ValueError(top)
    return SumHeader(torch.Size(shape), top)


def _volume(shape: Sequence[int]) -> int:
    """Return the number of elements, with lengths of 0 counted as 1; torch's own count overflows at 2**63."""
    return math.prod(max(1, size) for size in shape)
