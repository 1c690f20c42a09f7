"""Sums that do not depend on their order, of terms whose size nobody knows before.

Each term is cut into digits to the base 2**32, at places that are the same for every term, and each place adds its
digits by itself: multiples of one power of two, which float64 adds without error. The highest places of a tensor are
kept. Which ones, and what they hold, follows from the terms alone, not from who added them, when, or on which rank
(after Demmel and Nguyen, "Parallel reproducible summation", 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 32
"""Of a digit; the other 21 of float64 are left for two million terms."""
_PLACES = 3
"""Of a sum: at least 64 bits below its largest term."""
_LOWEST = -33
"""Smaller places are beyond float64."""


@dataclass(frozen=True)
class SumHeader:
    """What all ranks must know of a sum to add theirs."""

    shape: torch.Size
    top: int | None
    """The highest place in use; None where all terms are zero."""


class ExactSum:
    """A sum of tensors of one shape, in float64.

    Args:
        shape: Of the terms.
        device: Where they are added.

    Example:
        >>> terms = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 2.0**80, -(2.0**80))]
        >>> float(sum(terms)), float(sum(reversed(terms)))
        (0.0, 1.0)
        >>> exact = ExactSum(torch.Size(), torch.device("cpu"))
        >>> for term in terms: exact.add(term)
        >>> float(exact.value())
        1.0
    """

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._places: dict[int, Tensor] = {}

    @property
    def header(self) -> SumHeader:
        """Shape and highest place."""
        return SumHeader(self.shape, max(self._places, default=None))

    def add(self, term: Tensor) -> None:
        """Add a finite float64 term of the sum's shape."""
        largest = float(term.abs().max()) if term.numel() else 0.0
        if not largest:
            return
        term, top = term.to(self.device), (math.frexp(largest)[1] - 1) // _BITS
        lowest = max(max([top, *self._places]) - _PLACES + 1, _LOWEST)
        for place in range(top, lowest - 1, -1):
            unit = 2.0 ** (place * _BITS)
            digit = (term / unit).trunc_().mul_(unit)  # towards zero: the same digit whatever place it starts from
            term = term - digit
            self._places[place] = self._places[place] + digit if place in self._places else digit
        self._places = {place: total for place, total in self._places.items() if place >= lowest}

    def all_reduce(self, reduce: Callable[[Tensor], Tensor], header: SumHeader) -> None:
        """Add up the ranks' sums.

        Args:
            reduce: Sums a tensor over the ranks in place.
            header: As :func:`merge_headers` made it, the same on all ranks.
        """
        top, mine = header.top, self._places
        places = () if top is None else range(top, top - _PLACES, -1)
        self._places = {place: reduce(mine[place] if place in mine else self._zeros()) for place in places}

    def value(self) -> Tensor:
        """The sum, rounded to float64."""
        return sum((self._places[place] for place in sorted(self._places)), self._zeros())  # the smallest first

    def _zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.float64, device=self.device)


SumHeaders = Mapping[str, Mapping[str, SumHeader]]
"""By key of the `extra` tree and name."""


def merge_headers(parts: Iterable[SumHeaders]) -> dict[str, dict[str, SumHeader]]:
    """The extents of all ranks' sums together, in one order.

    Args:
        parts: One of each rank.
    """
    found: dict[tuple[str, str], SumHeader] = {}
    for key, name, header in [
        (k, n, header) for part in parts for k, tree in part.items() for n, header in tree.items()
    ]:
        known = found.get((key, name), header)
        tops = [top for top in (known.top, header.top) if top is not None]
        found[key, name] = SumHeader(header.shape, max(tops, default=None))
    whole: dict[str, dict[str, SumHeader]] = {}
    for key, name in sorted(found):
        whole.setdefault(key, {})[name] = found[key, name]
    return whole
