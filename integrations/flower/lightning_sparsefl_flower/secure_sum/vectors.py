"""The integers of a sum as one vector of words modulo 2**64, of which each is sent in as few bytes as its sum needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeaders, kept_places
from lightning_sparsefl.federated.exchange.flat import Layout
from torch import Tensor

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused

Mode = Literal["common", "coverage", "ragged"]
"""What a vector holds: all that is added, for clients with the same votes; numbers of votes; or all, for any votes."""
_WORD = 8
_MOST_STEPS = 2**51 + 2**32
"""Bound of a sum on its grid: 2**51 steps, and half a step of rounding for each term."""
_DIGIT = 2**32
"""Bound of a digit of a sum without a grid."""


@dataclass(frozen=True)
class Part:
    """One vector of integers among those of a sum."""

    name: str
    """Name, as of :meth:`Accumulator.integers`."""
    count: int
    """Number of integers that are sent."""
    width: int
    """Bytes of each."""


class Form:
    """Which integers of a sum are sent, in which order and width; both sides compute the same.

    In the mode ``common``, all clients vote on the same coordinates and send the same tensors. So only these
    coordinates are sent, and one count for each tensor, which holds for all of its votes.

    Args:
        layout: Layout of the model.
        mode: What the vector holds.
        headers: Merged headers of sums without a grid.
        support: Coordinates that are sent, bool of shape (size,); None = all.
        clients: Number of clients in the sum.
        total_weight: Upper bound of the sum of the updates' weights.
    """

    def __init__(
        self,
        layout: Layout,
        mode: Mode,
        headers: SumHeaders,
        support: Tensor | None,
        clients: int,
        total_weight: int,
    ) -> None:
        self.layout, self.mode = layout, mode
        self.support = torch.ones(layout.size, dtype=torch.bool) if support is None else support
        size = int(self.support.sum())
        tensors = len(layout.names)
        counted = tensors if mode == "common" else size
        facts = Part("facts", 7 + tensors, _WORD)
        voters = Part("voters", counted, width(clients))
        exact = [
            Part(f"{key}/{name}", len(kept_places(header)) * header.shape.numel(), width(_DIGIT * clients))
            for key, header_of in headers.items()
            for name, header in header_of.items()
        ]
        self._places = {f"{k}/{n}": len(kept_places(h)) for k, tree in headers.items() for n, h in tree.items()}
        weight = width(total_weight)
        sums = [Part("counts", tensors, weight), Part("sum", size, width(_MOST_STEPS))]
        sums += [Part("coordinate_counts", counted, weight), voters, *exact]
        self.parts: Sequence[Part] = [facts, voters] if mode == "coverage" else [facts, *sums]

    @property
    def count(self) -> int:
        """Number of words."""
        return sum(part.count for part in self.parts)

    def words(self, integers: Mapping[str, Tensor]) -> Any:
        """Return the vector of a client, as uint64 of shape (count,).

        Args:
            integers: Integers from :meth:`Accumulator.integers`.
        """
        pieces = [self._shortened(part.name, integers[part.name].cpu()).reshape(-1) for part in self.parts]
        for part, piece in zip(self.parts, pieces, strict=True):
            if len(piece) != part.count:
                raise SecureSumRefused(f"The sum of {part.name} has {len(piece)} integers; expected {part.count}.")
        return torch.cat(pieces).numpy().view(np.uint64)

    def integers(self, words: Any) -> dict[str, Tensor]:
        """Return the integers of a sum's vector; the parts that the mode leaves out are zero or follow from others.

        Args:
            words: Array of uint64 of shape (count,), of which only each part's own bytes count.
        """
        found, place = dict[str, Tensor](), 0
        for part in self.parts:
            unused = np.uint64(8 * (_WORD - part.width))
            signed = (words[place : place + part.count] << unused).view(np.int64) >> unused.astype(np.int64)
            found[part.name] = self._restored(part.name, torch.from_numpy(signed))
            place += part.count
        return found

    def pack(self, words: Any) -> bytes:
        """Return the bytes of a vector, without those that a sum does not need.

        Args:
            words: Array of uint64 of shape (count,).
        """
        pieces, place = [], 0
        for part in self.parts:
            own = np.ascontiguousarray(words[place : place + part.count], dtype="<u8")
            pieces.append(own.view(np.uint8).reshape(-1, _WORD)[:, : part.width].tobytes())
            place += part.count
        return b"".join(pieces)

    def unpack(self, payload: bytes) -> Any:
        """Return the vector of bytes; the bytes that were left out are zero.

        Args:
            payload: Bytes from :meth:`pack`.

        Raises:
            SecureSumRefused: If there are more or fewer bytes.
        """
        expected = sum(part.count * part.width for part in self.parts)
        if len(payload) != expected:
            raise SecureSumRefused(f"A masked update has {len(payload)} bytes; expected {expected}.")
        words, place, begin = np.zeros((self.count, _WORD), np.uint8), 0, 0
        for part in self.parts:
            end = begin + part.count * part.width
            own = np.frombuffer(payload[begin:end], np.uint8).reshape(-1, part.width)
            words[place : place + part.count, : part.width] = own
            place, begin = place + part.count, end
        return words.reshape(-1).view("<u8").astype(np.uint64, copy=False)

    def _shortened(self, name: str, vector: Tensor) -> Tensor:
        if name in ("coordinate_counts", "voters") and self.mode == "common":
            return torch.stack([piece.max() if len(piece) else piece.sum() for piece in self._pieces(vector)])
        return vector[self.support] if name in ("sum", "coordinate_counts", "voters") else vector

    def _restored(self, name: str, vector: Tensor) -> Tensor:
        if name in ("coordinate_counts", "voters") and self.mode == "common":
            return vector.repeat_interleave(torch.tensor(self.layout.sizes)) * self._counted
        if name in ("sum", "coordinate_counts", "voters"):
            whole = torch.zeros(self.layout.size, dtype=torch.int64)
            whole[self.support] = vector
            return whole
        return vector.reshape(self._places[name], -1) if self._places.get(name) else vector

    @property
    def _counted(self) -> Tensor:
        """Coordinates with the count of their tensor: those that are sent, and all of a tensor that is not sent."""
        return torch.cat([piece if bool(piece.any()) else ~piece for piece in self._pieces(self.support)])

    def _pieces(self, vector: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = vector.split(self.layout.sizes)
        return pieces


def width(bound: int) -> int:
    """Return the bytes of a signed integer whose absolute value is at most `bound`.

    Args:
        bound: Largest absolute value.

    Example:
        >>> width(127), width(128), width(2**51)
        (1, 2, 7)
    """
    return (bound.bit_length() + 1 + 7) // 8
