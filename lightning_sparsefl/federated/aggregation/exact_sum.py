"""Sums that do not depend on the order of their terms, whose magnitude need not be known in advance.

Each term is split into digits to the base 2**32, at places that are the same for all terms, and the digits of each
place are added separately. They are multiples of one power of two, which float64 adds without error. The highest
places of a tensor are kept. Which places these are and what they contain depends only on the terms, not on the order
or the rank that adds them (after Demmel and Nguyen, "Parallel reproducible summation", 2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidUpdate

_BITS = 32
"""Bits of a digit; the other 21 of float64 leave room for two million terms."""
_PLACES = 3
"""Places of a sum, which hold at least 64 bits below its largest term."""
_LOWEST = -33
"""Lowest place that float64 can represent."""


@dataclass(frozen=True)
class SumHeader:
    """The properties of a sum that all ranks need to add their parts."""

    shape: torch.Size
    top: int | None
    """Highest place in use; None if all terms are zero."""


class ExactSum:
    """A sum of tensors of one shape, in float64.

    Args:
        shape: Shape of the terms.
        device: Device of the sum.

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
        """Shape and highest place of the sum."""
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
            digit = (
                (term / unit).trunc_().mul_(unit)
            )  # towards zero, so that the digit does not depend on the first place
            term = term - digit
            self._places[place] = self._places[place] + digit if place in self._places else digit
        self._places = {place: total for place, total in self._places.items() if place >= lowest}

    def align(self, header: SumHeader) -> list[Tensor]:
        """Return the digits of each place that the ranks add, to be summed in place.

        Args:
            header: Header from :func:`merge_headers`, the same on all ranks.
        """
        mine = self._places
        self._places = {place: mine[place] if place in mine else self._zeros() for place in kept_places(header)}
        return list(self._places.values())

    def integers(self, header: SumHeader) -> Tensor:
        """Return the digits of the sum as int64, of shape (places, terms), which add up over its parts.

        Args:
            header: Header from :func:`merge_headers`, the same for all parts.
        """
        digits = [self._places.get(place, self._zeros()) / 2.0 ** (place * _BITS) for place in kept_places(header)]
        return torch.stack(digits).reshape(len(digits), -1).to(torch.int64) if digits else self._zeros().new_zeros(0)

    def add_integers(self, digits: Tensor, header: SumHeader) -> None:
        """Add the sum of other parts.

        Args:
            digits: Sums of what :meth:`integers` returns.
            header: The header that they were made with.
        """
        mine = self._places
        self._places = {
            place: mine.get(place, self._zeros()) + digit.reshape(self.shape).to(self.device) * 2.0 ** (place * _BITS)
            for place, digit in zip(kept_places(header), digits.double(), strict=True)
        }

    def value(self) -> Tensor:
        """Return the sum, rounded to float64."""
        return sum((self._places[place] for place in sorted(self._places)), self._zeros())  # smallest place first

    def _zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.float64, device=self.device)


def kept_places(header: SumHeader) -> Sequence[int]:
    """Return the places that a sum keeps, the highest one first.

    Args:
        header: Header from :func:`merge_headers`.
    """
    return () if header.top is None else range(header.top, max(header.top - _PLACES, _LOWEST - 1), -1)


SumHeaders = Mapping[str, Mapping[str, SumHeader]]
"""Headers by key, which is that of an `extra` tree behind `EXTRA`, and by name of the tensor."""
EXTRA = "extra/"


def merge_headers(parts: Iterable[SumHeaders]) -> dict[str, dict[str, SumHeader]]:
    """Merge the headers of all ranks' sums into one mapping, sorted by key and name.

    Args:
        parts: Headers of each rank.

    Raises:
        InvalidUpdate: If sums of one key and name have different shapes.
    """
    found: dict[tuple[str, str], SumHeader] = {}
    for key, name, header in [
        (k, n, header) for part in parts for k, tree in part.items() for n, header in tree.items()
    ]:
        known = found.get((key, name), header)
        require_equal_shapes(key.removeprefix(EXTRA), name, known.shape, header.shape)
        tops = [top for top in (known.top, header.top) if top is not None]
        found[key, name] = SumHeader(header.shape, max(tops, default=None))
    whole: dict[str, dict[str, SumHeader]] = {}
    for key, name in sorted(found):
        whole.setdefault(key, {})[name] = found[key, name]
    return whole


def require_equal_shapes(key: str, name: str, one: torch.Size, other: torch.Size) -> None:
    """Raise :class:`InvalidUpdate` if a tensor of an extra tree differs in shape between two clients.

    Args:
        key: Key of the tree.
        name: Name of the tensor.
        one: Shape from one client.
        other: Shape from another client.

    Example:
        >>> require_equal_shapes("control", "c", torch.Size([2]), torch.Size([3]))
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidUpdate: `extra['control']['c']` has the shape (2,) from one client and (3,) ...
    """
    if one != other:
        raise InvalidUpdate(
            f"`extra[{key!r}][{name!r}]` has the shape {tuple(one)} from one client and {tuple(other)} from another; "
            "expected equal shapes, since it is averaged."
        )
