"""Merge of late updates into the mean of a round (REFL).

The mean of the round and the late updates are equal on all ranks, so each rank computes the same merge by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparsefl.errors import check_types, is_whole, require
from lightning_sparsefl.types import Merged, PendingUpdate, Weights

_PIECE = 2**15
"""Number of elements that PyTorch adds in one thread, so that a sum does not depend on the number of threads."""


@dataclass(frozen=True, kw_only=True)
class StaleMean:
    """Mean of each coordinate over a round's updates and late ones, whose weights depend on age and deviation.

    An update of the round has the factor 1. A late one, drawn t rounds before, has the factor
    ``(1 - beta) / (t + 1) + beta (1 - exp(-L / L_max))``; L is the squared distance of its change from the mean change
    of the round, and L_max is the largest of these distances. Factors multiply the updates' own weights.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    beta: float = 0.35
    """Share of the deviation in the factor, in [0, 1]."""
    limit: int | None = None
    """Largest number of rounds after which a late update is merged, >= 1; an older one is dropped. null = no limit."""

    def __post_init__(self) -> None:
        check_types(self, "federation.sampler.")
        require(0 <= self.beta <= 1, "federation.sampler.beta", self.beta, "a number in [0, 1]")
        fits = self.limit is None or is_whole(self.limit, 1)
        require(fits, "federation.sampler.limit", self.limit, "a whole number >= 1, or null")

    def factors(self, ages: Sequence[int], deviations: Sequence[float]) -> list[float]:
        """Return the factors of late updates.

        Args:
            ages: Numbers of rounds since the updates' clients were drawn.
            deviations: Squared distances of the updates from the mean of the round.

        Example:
            >>> late = StaleMean().factors([1, 3], [4.0, 1.0])
            >>> [round(factor / (2 + sum(late)), 7) for factor in [1, 1, *late]]
            [0.3589167, 0.3589167, 0.1960554, 0.0861112]
        """
        most = max(deviations, default=0.0)
        shares = [deviation / most if most else 0.0 for deviation in deviations]
        return [
            (1 - self.beta) / (age + 1) + self.beta * (1 - math.exp(-share))
            for age, share in zip(ages, shares, strict=True)
        ]

    def current(self, late: Sequence[PendingUpdate], round: int) -> list[PendingUpdate]:
        """Return the late updates that are not older than the limit.

        Args:
            late: Updates that arrived in a round.
            round: Index of the round.
        """
        return [update for update in late if self.limit is None or round - update.round <= self.limit]

    def merge(
        self,
        merged: Merged,
        counts: Mapping[str, Tensor],
        late: Sequence[PendingUpdate],
        *,
        server: Weights,
        round: int,
        buffers: frozenset[str],
        silence_counts: bool,
    ) -> Merged:
        """Return the mean of a round's updates and of late ones.

        Args:
            merged: Mean of the round.
            counts: Sum of the weights of the round's updates, by name, for all coordinates or for each.
            late: Late updates.
            server: Weights before the round that updates refer to.
            round: Index of the round.
            buffers: Names of the buffers, which are weighted by samples and do not count in the deviation.
            silence_counts: Whether a coordinate that an update does not vote on counts as unchanged.
        """
        if not late:
            return merged
        base = {name: server[name].double() if merged.kind == "weights" else 0.0 for name in merged.weights}
        fresh = {name: torch.where(counts[name] > 0, w.double() - base[name], 0) for name, w in merged.weights.items()}
        moved = [_on_votes(update, counts) for update in late]
        deviations = [_distance(changes, fresh, update, buffers) for changes, update in zip(moved, late, strict=True)]
        factors = self.factors([round - update.round for update in late], deviations)
        weights, covered = dict(merged.weights), dict(merged.covered)
        for name, mean in fresh.items():
            total, count = mean * counts[name], counts[name]
            for update, changes, factor in zip(late, moved, factors, strict=True):
                if name not in changes and not silence_counts:
                    continue
                own = factor * (update.num_examples if name in buffers else update.weight)
                votes = None if silence_counts else update.votes.get(name)
                total = total + own * changes[name] if name in changes else total
                count = count + (own if votes is None else own * votes.to(mean.device))
            value = torch.where(count > 0, base[name] + total / count, 0)  # as of a mean without late updates
            weights[name] = value.to(merged.weights[name].dtype)
            if name in covered:
                covered[name] = (
                    _or_voted(covered[name], name, late) if silence_counts else (count > 0).expand(mean.shape)
                )
        return replace(merged, weights=weights, covered=covered, voters=_voters(merged, late), late=len(late))


def _or_voted(covered: Tensor, name: str, late: Sequence[PendingUpdate]) -> Tensor:
    """Return the coordinates that updates of the round, or late ones, vote on."""
    for update in late:
        if name in update.changes:
            votes = update.votes.get(name)
            covered = covered.logical_or(torch.ones_like(covered) if votes is None else votes.to(covered.device))
    return covered


def _voters(merged: Merged, late: Sequence[PendingUpdate]) -> dict[str, Tensor]:
    """Return the number of votes on each coordinate, late ones included, without the tensors on which all voted."""
    voters = dict(merged.voters)
    for name, mean in merged.weights.items():
        if name not in voters:
            if all(name in update.changes and name not in update.votes for update in late):
                continue
            voters[name] = torch.full(mean.shape, len(merged.reports), dtype=torch.int32, device=mean.device)
        for update in late:
            if name in update.changes:
                votes = update.votes.get(name)
                voters[name] = voters[name] + (1 if votes is None else votes.to(voters[name]))
    return voters


def _on_votes(update: PendingUpdate, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the changes of an update in double precision, zero where it does not vote."""
    found = {name: change.to(counts[name].device).double() for name, change in update.changes.items()}
    return {n: c * update.votes[n].to(c.device) if n in update.votes else c for n, c in found.items()}


def _distance(changes: Weights, fresh: Weights, update: PendingUpdate, buffers: frozenset[str]) -> float:
    """Return the squared distance of an update's changes from the mean change, where it votes."""
    sums = list[Tensor]()
    for name, change in changes.items():
        if name not in buffers:
            apart = change - fresh[name]
            apart = apart * update.votes[name].to(apart.device) if name in update.votes else apart
            sums += [piece.square().sum() for piece in apart.reshape(-1).split(_PIECE)]
    return math.fsum(torch.stack(sums).tolist()) if sums else 0.0
