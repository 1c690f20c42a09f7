"""Reducers that merge each coordinate from all votes on it, such as robust ones, which bound the influence of a few.

Every update is stored until the round is merged, so the memory is that of the cohort's weights, divided among the
ranks. The ranks exchange their votes tensor by tensor, and each rank sorts all votes of the tensor. The result does not
depend on the placement of clients, so it is bit-equal for any number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, Gather, Reducer, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.hook_results import check_result
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.types import Merged, Message, Update, Weights

_Cut: TypeAlias = Callable[[int], int]
"""Function from the number of votes to the number that is dropped at each end."""


class CoordinateReducer(Reducer):
    """Base class of reducers that compute the new value of a coordinate from all votes on it.

    Without votes the server keeps its value. Clients have equal weights, also for buffers; `extra` trees are averaged
    as in :class:`CoverageMean`. A subclass is a frozen dataclass that defines :meth:`merge`.
    """

    @abstractmethod
    def merge(self, votes: Tensor) -> Tensor:
        """Return the merged values of one tensor, of shape (coordinates,) and any floating-point type.

        The value of a coordinate without votes is not used.

        Args:
            votes: Votes of shape (clients, coordinates), in ascending order in each column, so that they do not depend
                on the placement of clients; NaN, at the end of a column, for each client that did not vote. They are
                weights, or differences where the method's updates are.
        """

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return VotesAccumulator(layout, server, total_weight, reducer=self)


@dataclass(frozen=True)
class CoverageMedian(CoordinateReducer):
    """Median of each coordinate over the clients that voted on it (Yin et al. 2018, arXiv:1803.01498, option I).

    For an even number of votes it is the mean of the middle two.
    """

    def merge(self, votes: Tensor) -> Tensor:
        """See :class:`CoordinateReducer`."""
        return trimmed_mean(votes, lambda count: max(count - 1, 0) // 2)


@dataclass(frozen=True)
class TrimmedMean(CoordinateReducer):
    """Mean of each coordinate without its extreme votes (Yin et al. 2018, arXiv:1803.01498, option II)."""

    fraction: float = 0.1
    """Fraction of a coordinate's votes that is dropped at each end, in [0, 0.5); the number is rounded down."""

    def __post_init__(self) -> None:
        check_types(self, "federation.reducer.")
        require(0 <= self.fraction < 0.5, "federation.reducer.fraction", self.fraction, "a number in [0, 0.5)")

    def merge(self, votes: Tensor) -> Tensor:
        """See :class:`CoordinateReducer`."""
        return trimmed_mean(votes, lambda count: floor_count(self.fraction, count))


class VotesAccumulator(Accumulator):
    """Accumulator that stores every vote; counts of votes, `extra` trees and checks are those of the mean.

    Args:
        layout: Layout of the model.
        server: Weights before the round.
        total_weight: Upper bound of the sum of the updates' weights.
        reducer: Reducer that merges the votes.
    """

    def __init__(self, layout: Layout, server: Weights, total_weight: int, *, reducer: CoordinateReducer) -> None:
        super().__init__(layout, Grid.of(layout, server, total_weight), silence_counts=False)
        self._reducer = reducer
        self._rows: dict[str, list[Tensor]] = {name: [] for name in layout.names}
        self._merged = torch.zeros(layout.size, dtype=layout.dtype, device=self.device)

    def _add_weights(self, update: Update, message: Message, num_examples: int) -> None:
        super()._add_weights(update, message, num_examples)
        votes = voted(update, message)
        for name, value in update.weights.items():
            row = value.detach().to(self.layout.dtype) + 0.0  # turns -0 into 0, since a sort does not order them
            row = torch.where(votes[name].to(row.device), row, torch.nan) if name in votes else row
            self._rows[name].append(row.reshape(-1))

    def collect(self, gather: Gather) -> None:
        """Merge the votes of all ranks, and free them.

        Args:
            gather: Function that returns the values of all ranks.

        Raises:
            InvalidOption: If the reducer returns something else than a finite number for each coordinate with votes.
        """
        for name, merged in zip(self.layout.names, self._pieces(self._merged), strict=True):
            rows = self._rows.pop(name)
            mine = torch.stack(rows) if rows else merged.new_zeros(0, merged.numel())
            votes = torch.cat(gather(mine.cpu())).to(self.device).sort(dim=0).values  # NaN is sorted last
            if len(votes):
                voted_on = ~votes[0].isnan()
                merged.copy_(torch.where(voted_on, self._checked(name, votes, voted_on), 0.0))

    def _checked(self, name: str, votes: Tensor, voted_on: Tensor) -> Tensor:
        """Return the merged values of a tensor, with finite ones where a client voted."""
        values = self._reducer.merge(votes)
        check_result(self._reducer, "merge", values, Tensor)
        what = f"`{type(self._reducer).__name__}.merge` returned for {name!r}"
        if values.shape != voted_on.shape or not values.is_floating_point():
            raise InvalidOption(
                f"{what} {values.dtype} of shape {tuple(values.shape)}; expected floating-point numbers of shape "
                f"{tuple(voted_on.shape)}, one for each coordinate."
            )
        if not bool(values[voted_on].isfinite().all()):
            raise InvalidOption(f"{what} values that are not finite; expected finite ones where a client voted.")
        return values

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """Return the merged update with the values of :meth:`collect`.

        Args:
            reports: Metrics by client, passed on to the algorithm.
        """
        return replace(super().result(reports), weights=self.layout.tree(self._merged))


def trimmed_mean(ordered: Tensor, cut: _Cut) -> Tensor:
    """Compute the mean of each column in float64 without its extreme votes; 0 for a column without votes.

    Args:
        ordered: Votes with one row per client, ascending in each column; NaN, at its end, where a client did not vote.
        cut: Function from the number of votes to the number that is dropped at each end.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [9.0], [torch.nan]]), lambda votes: 1).tolist()
        [2.0]
    """
    voters = (~ordered.isnan()).sum(0)
    dropped = torch.tensor([cut(count) for count in range(len(ordered) + 1)], device=ordered.device)[voters]
    place = torch.arange(len(ordered), device=ordered.device).unsqueeze(1)
    counts = (place >= dropped) & (place < voters - dropped)
    total = torch.where(counts, ordered, 0.0).sum(0, dtype=torch.float64)
    return total / (voters - 2 * dropped).clamp_min(1)
