"""Reducers that a few wrong updates cannot move far: the votes on each coordinate are put in order, not added.

Every update is kept until the round is merged, so memory is the cohort times the weights, shared among the ranks.
Tensor by tensor the ranks show each other their votes, and each of them orders all of the tensor's. An order does not
depend on who trained whom, so one rank and many give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, Gather, Reducer, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.types import Merged, Message, Update, Weights

_Cut: TypeAlias = Callable[[int], int]
"""How many votes are left out at each end, by how many there are."""


@dataclass(frozen=True)
class CoverageMedian(Reducer):
    """Each coordinate is the median of those who voted on it (Yin et al. 2018, arXiv:1803.01498, option I).

    Of an even number of votes it is the mean of the two in the middle. Where nobody voted the server keeps its value.
    Clients count alike, whatever their samples, buffers too; `extra` trees are still averaged.
    """

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return OrderStatisticAccumulator(layout, server, total_weight, cut=lambda votes: max(votes - 1, 0) // 2)


@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """Each coordinate is the mean of its votes without the extreme ones (Yin et al. 2018, arXiv:1803.01498, option II).

    All else is as in :class:`CoverageMedian`.
    """

    fraction: float = 0.1
    """Share of a coordinate's votes that is left out at each end, rounded down, in [0, 0.5)."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 0.5:
            raise InvalidOption(f"`TrimmedMean(fraction={self.fraction})`: expected a number in [0, 0.5).")

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return OrderStatisticAccumulator(
            layout, server, total_weight, cut=lambda votes: floor_count(self.fraction, votes)
        )


class OrderStatisticAccumulator(Accumulator):
    """Keeps every vote; who voted where, `extra` trees and checks are those of the mean.

    Args:
        layout: Of the model.
        server: The weights before the round.
        total_weight: Upper bound of the summed weights.
        cut: How many votes are left out at each end, by how many there are.
    """

    def __init__(self, layout: Layout, server: Weights, total_weight: int, *, cut: _Cut) -> None:
        super().__init__(layout, server, total_weight, silence_counts=False)
        self._cut = cut
        self._rows: dict[str, list[Tensor]] = {name: [] for name in layout.names}
        self._centre = torch.zeros(layout.size, dtype=layout.dtype, device=self.device)

    def _add_weights(self, update: Update, message: Message, num_examples: int) -> None:
        super()._add_weights(update, message, num_examples)
        votes = voted(update, message)
        for name, value in update.weights.items():
            row = value.detach().to(self.layout.dtype) + 0.0  # of 0 and -0 neither is first, and the bytes would tell
            row = torch.where(votes[name].to(row.device), row, torch.nan) if name in votes else row
            self._rows[name].append(row.reshape(-1))

    def collect(self, gather: Gather) -> None:
        """Order the votes of all ranks, and forget them."""
        for name, centre in zip(self.layout.names, self._pieces(self._centre), strict=True):
            rows = self._rows.pop(name)
            mine = torch.stack(rows) if rows else centre.new_zeros(0, centre.numel())
            centre.copy_(trimmed_mean(torch.cat(gather(mine.cpu())).to(self.device), self._cut))

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """What :meth:`collect` found."""
        return replace(super().result(reports), weights=self.layout.tree(self._centre))


def trimmed_mean(votes: Tensor, cut: _Cut) -> Tensor:
    """Mean of each column in float64, without its extreme votes; 0 where there is none.

    Args:
        votes: A row for each client, NaN where it did not vote.
        cut: How many are left out at each end, by how many there are.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [9.0], [torch.nan], [2.0]]), lambda votes: 1).tolist()
        [2.0]
    """
    ordered = votes.sort(dim=0).values  # NaN comes last
    voters = (~votes.isnan()).sum(0)
    dropped = torch.tensor([cut(count) for count in range(len(votes) + 1)], device=votes.device)[voters]
    place = torch.arange(len(votes), device=votes.device).unsqueeze(1)
    counts = (place >= dropped) & (place < voters - dropped)
    total = torch.where(counts, ordered, 0.0).sum(0, dtype=torch.float64)
    return total / (voters - 2 * dropped).clamp_min(1)
