"""Composition of stacks: which clients of a cohort train together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise


def compose_stacks(
    loads: Mapping[int, float], size: int, alike: Mapping[int, Hashable] | None = None
) -> list[tuple[int, ...]]:
    """Divide a cohort into stacks of almost equal size, whose clients have similar loads.

    The stacks are a function of the cohort and its data, and not of ranks or clocks, so that a run repeats itself on
    any number of ranks and after a kill.

    Args:
        loads: Work of each client, in proportion to its samples.
        size: Largest number of clients in a stack.
        alike: Values that the clients of a stack have in common; None = all may be in one.

    Returns:
        Stacks by falling loads of their clients.

    Example:
        >>> compose_stacks({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3)
        [(1, 3), (0, 2)]
        >>> compose_stacks({0: 5.0, 1: 9.0}, 1)
        [(1,), (0,)]
        >>> compose_stacks({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3, {0: "a", 1: "b", 2: "a", 3: "b"})
        [(1, 3), (0, 2)]
    """
    groups: dict[Hashable, list[int]] = {}
    for client in sorted(loads, key=lambda client: (-loads[client], client)):
        groups.setdefault(None if alike is None else alike[client], []).append(client)
    return [stack for clients in groups.values() for stack in _runs(clients, size)]


def _runs(clients: Sequence[int], size: int) -> list[tuple[int, ...]]:
    count = math.ceil(len(clients) / size)
    edges = [len(clients) * number // count for number in range(count + 1)]
    return [tuple(clients[low:high]) for low, high in pairwise(edges)]
