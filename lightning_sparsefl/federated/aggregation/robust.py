"""Robust reducers, which bound the influence of a few wrong updates by order statistics of each coordinate.

Every update is stored until the round is merged, so the memory is that of the cohort's weights, divided among the
ranks. The ranks exchange their votes tensor by tensor, and each rank sorts all votes of the tensor. The result does not
depend on the placement of clients, so it is bit-equal for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, Gather, Reducer, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.types import Merged, Message, Update, Weights

_Cut: TypeAlias = Callable[[int], int]
"""Function from the number of votes to the number that is dropped at each end."""


@dataclass(frozen=True)
class CoverageMedian(Reducer):
    """Median of each coordinate over the clients that voted on it (Yin et al. 2018, arXiv:1803.01498, option I).

    For an even number of votes it is the mean of the middle two. Without votes the server keeps its value. Clients have
    equal weights, also for buffers; `extra` trees are averaged as in :class:`CoverageMean`.
    """

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return OrderStatisticAccumulator(layout, server, total_weight, cut=lambda votes: max(votes - 1, 0) // 2)


@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """Mean of each coordinate without its extreme votes (Yin et al. 2018, arXiv:1803.01498, option II).

    Other properties are those of :class:`CoverageMedian`.
    """

    fraction: float = 0.1
    """Fraction of a coordinate's votes that is dropped at each end, in [0, 0.5); the number is rounded down."""

    def __post_init__(self) -> None:
        check_types(self, "federation.reducer.")
        require(0 <= self.fraction < 0.5, "federation.reducer.fraction", self.fraction, "a number in [0, 0.5)")

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return OrderStatisticAccumulator(
            layout, server, total_weight, cut=lambda votes: floor_count(self.fraction, votes)
        )


class OrderStatisticAccumulator(Accumulator):
    """Accumulator that stores every vote; counts of votes, `extra` trees and checks are those of the mean.

    Args:
        layout: Layout of the model.
        server: Weights before the round.
        total_weight: Upper bound of the sum of the updates' weights.
        cut: Function from the number of votes to the number that is dropped at each end.
    """

    def __init__(self, layout: Layout, server: Weights, total_weight: int, *, cut: _Cut) -> None:
        super().__init__(layout, Grid.of(layout, server, total_weight), silence_counts=False)
        self._cut = cut
        self._rows: dict[str, list[Tensor]] = {name: [] for name in layout.names}
        self._centre = torch.zeros(layout.size, dtype=layout.dtype, device=self.device)

    def _add_weights(self, update: Update, message: Message, num_examples: int) -> None:
        super()._add_weights(update, message, num_examples)
        votes = voted(update, message)
        for name, value in update.weights.items():
            row = value.detach().to(self.layout.dtype) + 0.0  # turns -0 into 0, since a sort does not order them
            row = torch.where(votes[name].to(row.device), row, torch.nan) if name in votes else row
            self._rows[name].append(row.reshape(-1))

    def collect(self, gather: Gather) -> None:
        """Compute the order statistics of the votes of all ranks, and free the votes.

        Args:
            gather: Function that returns the values of all ranks.
        """
        for name, centre in zip(self.layout.names, self._pieces(self._centre), strict=True):
            rows = self._rows.pop(name)
            mine = torch.stack(rows) if rows else centre.new_zeros(0, centre.numel())
            centre.copy_(trimmed_mean(torch.cat(gather(mine.cpu())).to(self.device), self._cut))

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """Return the merged update with the order statistics of :meth:`collect`.

        Args:
            reports: Metrics by client, passed on to the algorithm.
        """
        return replace(super().result(reports), weights=self.layout.tree(self._centre))


def trimmed_mean(votes: Tensor, cut: _Cut) -> Tensor:
    """Compute the mean of each column in float64 without its extreme votes; 0 for a column without votes.

    Args:
        votes: Votes with one row per client, NaN where it did not vote.
        cut: Function from the number of votes to the number that is dropped at each end.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [9.0], [torch.nan], [2.0]]), lambda votes: 1).tolist()
        [2.0]
    """
    ordered = votes.sort(dim=0).values  # NaN is sorted last
    voters = (~votes.isnan()).sum(0)
    dropped = torch.tensor([cut(count) for count in range(len(votes) + 1)], device=votes.device)[voters]
    place = torch.arange(len(votes), device=votes.device).unsqueeze(1)
    counts = (place >= dropped) & (place < voters - dropped)
    total = torch.where(counts, ordered, 0.0).sum(0, dtype=torch.float64)
    return total / (voters - 2 * dropped).clamp_min(1)
