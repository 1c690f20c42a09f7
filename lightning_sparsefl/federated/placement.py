"""Which rank trains whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from lightning_sparsefl.federated.process import Ranks


def longest_first(loads: Mapping[int, float], ranks: int) -> list[list[int]]:
    """Jobs per rank: each job, longest first, goes to the rank with the least to do.

    Args:
        loads: Expected work of each job.
        ranks: Number of ranks.

    Example:
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2)
        [[0], [1, 2]]
    """
    plan: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for job in _longest_first(loads):
        rank = totals.index(min(totals))
        plan[rank].append(job)
        totals[rank] += loads[job]
    return plan


def _longest_first(loads: Mapping[int, float]) -> Sequence[int]:
    return sorted(loads, key=lambda job: (-loads[job], job))


def assigned(
    loads: Mapping[int, float], ranks: Ranks, mode: Literal["static", "dynamic"], ticket: str
) -> Iterator[int]:
    """This rank's jobs.

    Args:
        loads: Expected work of each job.
        ranks: The processes.
        mode: ``static`` plans ahead; with ``dynamic`` whoever is free takes the longest job left.
        ticket: Name of the queue, new for each batch of jobs.
    """
    if mode == "static" or ranks.size == 1:
        yield from longest_first(loads, ranks.size)[ranks.rank]
        return
    order = _longest_first(loads)
    while (number := ranks.next_ticket(ticket)) < len(order):
        yield order[number]
