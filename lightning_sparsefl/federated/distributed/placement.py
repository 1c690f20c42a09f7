"""Which rank trains whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from lightning_sparsefl.federated.distributed.ranks import Ranks


def longest_first(
    loads: Mapping[int, float], ranks: int, seconds_per_flop: Sequence[float] | None = None
) -> list[list[int]]:
    """Jobs per rank: each job, longest first, goes to the rank that would be done with it first.

    Args:
        loads: Expected work of each job.
        ranks: Number of ranks.
        seconds_per_flop: Time that each rank takes for a unit of work; None = all the same.

    Example:
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2)
        [[0], [1, 2]]
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2, seconds_per_flop=[3.0, 1.0])
        [[2], [0, 1]]
    """
    plan: list[list[int]] = [[] for _ in range(ranks)]
    totals, seconds_per_flop = [0.0] * ranks, seconds_per_flop or [1.0] * ranks
    for job in _longest_first(loads):
        ends = [total + loads[job] * pace for total, pace in zip(totals, seconds_per_flop, strict=True)]
        rank = ends.index(min(ends))
        plan[rank].append(job)
        totals[rank] = ends[rank]
    return plan


def _longest_first(loads: Mapping[int, float]) -> Sequence[int]:
    return sorted(loads, key=lambda job: (-loads[job], job))


def assigned(
    loads: Mapping[int, float],
    ranks: Ranks,
    mode: Literal["static", "dynamic"],
    ticket: str,
    seconds_per_flop: Sequence[float] | None = None,
) -> Iterator[int]:
    """This rank's jobs.

    Args:
        loads: Expected work of each job.
        ranks: The processes.
        mode: ``static`` plans ahead; with ``dynamic`` whoever is free takes the longest job left.
        ticket: Name of the queue, new for each batch of jobs.
        seconds_per_flop: As in :func:`longest_first`.
    """
    if mode == "static" or ranks.size == 1:
        yield from longest_first(loads, ranks.size, seconds_per_flop)[ranks.rank]
        return
    order = _longest_first(loads)
    while (number := ranks.next_ticket(ticket)) < len(order):
        yield order[number]
