"""Composition of stacks: which clients of a cohort train together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise


def compose_stacks(loads: Mapping[int, float], size: int) -> list[tuple[int, ...]]:
    """Divide a cohort into stacks of almost equal size, like with like.

    The stacks are a function of the cohort and its data, and not of ranks or clocks, so that a run repeats itself on
    any number of ranks and after a kill.

    Args:
        loads: Work of each client, in proportion to its samples.
        size: Largest number of clients in a stack.

    Returns:
        Stacks by falling loads of their clients.

    Example:
        >>> compose_stacks({0: 5.0, 1: 9.0, 2: 5.0, 3: 7.0}, 3)
        [(1, 3), (0, 2)]
        >>> compose_stacks({0: 5.0, 1: 9.0}, 1)
        [(1,), (0,)]
    """
    clients = sorted(loads, key=lambda client: (-loads[client], client))
    count = math.ceil(len(clients) / size)
    edges = [len(clients) * number // count for number in range(count + 1)] if count else [0]
    return [tuple(clients[low:high]) for low, high in pairwise(edges)]
