"""Placement of clients on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_sparsefl.federated.distributed.ranks import Ranks


def longest_first(
    loads: Mapping[int, float], ranks: int, seconds_per_flop: Sequence[float] | None = None, reserved: float = 0.0
) -> list[list[int]]:
    """Assign jobs to ranks: each job, longest first, goes to the rank that would finish it first.

    Args:
        loads: Expected work of each job.
        ranks: Number of ranks.
        seconds_per_flop: Time that each rank needs for a unit of work; None = equal speeds.
        reserved: Additional work of rank 0.

    Returns:
        The jobs of each rank.

    Example:
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2)
        [[0], [1, 2]]
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2, seconds_per_flop=[3.0, 1.0])
        [[2], [0, 1]]
        >>> longest_first({0: 5.0, 1: 3.0, 2: 3.0}, 2, reserved=6.0)
        [[2], [0, 1]]
    """
    plan: list[list[int]] = [[] for _ in range(ranks)]
    seconds_per_flop = seconds_per_flop or [1.0] * ranks
    totals = [reserved * seconds_per_flop[0], *[0.0] * (ranks - 1)]
    for job in _longest_first(loads):
        ends = [total + loads[job] * pace for total, pace in zip(totals, seconds_per_flop, strict=True)]
        rank = ends.index(min(ends))
        plan[rank].append(job)
        totals[rank] = ends[rank]
    return plan


def _longest_first(loads: Mapping[int, float]) -> Sequence[int]:
    return sorted(loads, key=lambda job: (-loads[job], job))


def tickets(loads: Mapping[int, float], ranks: Ranks, queue: str) -> Iterator[int]:
    """Iterate over this rank's jobs: each free rank takes the longest remaining job.

    Args:
        loads: Expected work of each job.
        ranks: Processes of the run.
        queue: Name of the queue, new for each batch of jobs.
    """
    order = _longest_first(loads)
    while (number := ranks.next_ticket(queue)) < len(order):
        yield order[number]
