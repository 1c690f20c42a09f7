"""Composition of stacks: which clients of a cohort train or are scored together.

Stacks are a function of the cohort and its data, and not of ranks or clocks, so that a run repeats itself on any number
of ranks and after a kill.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise


def compose_stacks(
    loads: Mapping[int, float], size: int, alike: Mapping[int, Hashable] | None = None
) -> list[tuple[int, ...]]:
    """Divide a cohort that trains into as few stacks as possible, of almost equal loads, so that no rank waits long.

    Each client, by falling load, goes to the stack with the smallest load of those that have room.

    Args:
        loads: Work of each client, in proportion to its samples.
        size: Largest number of clients in a stack.
        alike: Values that the clients of a stack have in common; None = all may be in one.

    Returns:
        Stacks by the falling loads of their largest clients, for each of the values.

    Example:
        >>> compose_stacks({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3)
        [(1, 2), (3, 0)]
        >>> compose_stacks({0: 5.0, 1: 9.0}, 1)
        [(1,), (0,)]
        >>> compose_stacks({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3, {0: "a", 1: "b", 2: "a", 3: "b"})
        [(1, 3), (0, 2)]
    """
    groups: dict[Hashable, list[int]] = {}
    for client in _falling(loads):
        groups.setdefault(None if alike is None else alike[client], []).append(client)
    return [stack for clients in groups.values() for stack in _balanced(clients, loads, size)]


def _balanced(clients: Sequence[int], loads: Mapping[int, float], size: int) -> Iterator[tuple[int, ...]]:
    stacks: list[list[int]] = [[] for _ in range(math.ceil(len(clients) / size))]
    with_room = [(0.0, number) for number in range(len(stacks))]
    for client in clients:
        total, number = heapq.heappop(with_room)
        stacks[number].append(client)
        if len(stacks[number]) < size:
            heapq.heappush(with_room, (total + loads[client], number))
    return map(tuple, stacks)


def compose_evaluations(loads: Mapping[int, float], size: int) -> list[tuple[int, ...]]:
    """Divide clients that are scored into stacks of almost equal size, whose clients have similar loads.

    An evaluation takes a step for each number of samples that occurs in a stack.

    Args:
        loads: Work of each client, in proportion to its samples.
        size: Largest number of clients in a stack.

    Returns:
        Stacks by the falling loads of their clients.

    Example:
        >>> compose_evaluations({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3)
        [(1, 3), (0, 2)]
    """
    clients = _falling(loads)
    count = math.ceil(len(clients) / size)
    edges = [len(clients) * number // count for number in range(1, count + 1)]
    return [tuple(clients[low:high]) for low, high in pairwise([0, *edges])]


def _falling(loads: Mapping[int, float]) -> list[int]:
    return sorted(loads, key=lambda client: (-loads[client], client))
