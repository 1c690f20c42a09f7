"""Draws of clients as functions of a seed or key, and the split into clients that train and those that do not."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_sparsefl.seeds import generator

Randoms: TypeAlias = Callable[[int], NDArray[np.float64]]
"""Function that returns a number of new random numbers in [0, 1)."""


def uniform_cohort(seed: int, round: int, clients: Sequence[int], count: int) -> list[int]:
    """Draw the clients of a round uniformly without replacement, in ascending order.

    Args:
        seed: Random seed of the run.
        round: Index of the round, from 0.
        clients: Clients to draw from.
        count: Number of clients to draw.

    Example:
        >>> uniform_cohort(0, 0, range(5), 5)
        [0, 1, 2, 3, 4]
        >>> uniform_cohort(0, 1, range(100), 10) != uniform_cohort(0, 2, range(100), 10)
        True
    """
    return drawn(clients, count, _seeded(seed, round, "cohort"))


def evaluated_clients(seed: int, clients: Sequence[int], count: int | str) -> Sequence[int]:
    """Return the clients of every evaluation: all of them, or a sample that is the same in all rounds.

    Args:
        seed: Random seed of the run.
        clients: Clients to draw from.
        count: Number of clients, or "all".

    Example:
        >>> evaluated_clients(0, range(3), "all"), len(evaluated_clients(0, range(100), 7))
        (range(0, 3), 7)
    """
    if count == "all" or int(count) >= len(clients):
        return clients
    return drawn(clients, int(count), _seeded(seed, "evaluated clients"))


class Training(Sequence[int]):
    """Numbers of the training clients in ascending order, stored as the few numbers that are missing.

    Args:
        num_clients: Number of clients of the fleet.
        unseen: Numbers that are missing, in ascending order.

    Example:
        >>> list(Training(5, [1, 3])), Training(10**9, [0])[-1]
        ([0, 2, 4], 999999999)
    """

    def __init__(self, num_clients: int, unseen: Sequence[int]) -> None:
        self._present = range(num_clients - len(unseen))
        self._before = [
            client - place for place, client in enumerate(unseen)
        ]  # number of present clients below each missing one

    def __len__(self) -> int:
        return len(self._present)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[i] for i in self._present[place]]
        number = self._present[place]
        return number + bisect_right(self._before, number)

    def numbers(self) -> NDArray[np.int64]:
        """Return all numbers as an array."""
        present = np.arange(len(self))
        return present + np.searchsorted(np.array(self._before, np.int64), present, side="right")


def split_unseen(seed: int, num_clients: int, count: int) -> tuple[Sequence[int], list[int]]:
    """Split the clients at random into those that train and those that never do.

    Args:
        seed: Random seed of the run.
        num_clients: Number of clients of the fleet.
        count: Number of clients that never train.

    Example:
        >>> training, unseen = split_unseen(0, 5, 2)
        >>> len(unseen), sorted([*training, *unseen])
        (2, [0, 1, 2, 3, 4])
    """
    unseen = drawn(range(num_clients), count, _seeded(seed, "unseen clients"))
    return Training(num_clients, unseen), unseen


def _seeded(*key: int | str) -> Callable[[int], int]:
    """Return a function that draws a number below its argument, from a generator with the key's seed."""
    return numbers_below(generator(*key))


def numbers_below(rng: torch.Generator) -> Callable[[int], int]:
    """Return a function that draws a number below its argument.

    Args:
        rng: Generator to draw from.
    """
    return lambda limit: int(torch.randint(limit, (), generator=rng))


def drawn(clients: Sequence[int], count: int, below: Callable[[int], int]) -> list[int]:
    """Draw clients by a Fisher-Yates shuffle that stores only the moved entries.

    Args:
        clients: Clients to draw from.
        count: Number of clients to draw.
        below: Function that draws a number below its argument.

    Returns:
        The drawn clients in ascending order.
    """
    moved, front = dict[int, int](), list[int]()
    for place in range(min(count, len(clients))):
        left = len(clients) - place
        other = place + (below(left) if left > 1 else 0)
        front.append(clients[moved.get(other, other)])
        moved[other] = moved.get(place, place)
    return sorted(front)


def numbers(clients: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of clients as an array.

    Args:
        clients: Numbers of clients.

    Example:
        >>> numbers(range(2, 4)), numbers(Training(5, [1, 3])), numbers([7])
        (array([2, 3]), array([0, 2, 4]), array([7]))
    """
    if isinstance(clients, Training):
        return clients.numbers()
    if isinstance(clients, range):
        return np.arange(clients.start, clients.stop, clients.step)
    return np.fromiter(clients, np.int64, len(clients))


def randoms(rng: torch.Generator) -> Randoms:
    """Return a function that draws random numbers in [0, 1).

    Args:
        rng: Generator to draw from.
    """
    return lambda count: torch.rand(count, dtype=torch.float64, generator=rng).numpy()


def weighted(weights: NDArray[np.float64], count: int, uniform: Randoms) -> NDArray[np.int64]:
    """Draw places without replacement, with probabilities in proportion to the weights of those that are left.

    A draw searches the sums of blocks and then one block, so that it takes the root of the number of places.

    Args:
        weights: Weights >= 0 of the places; if those that are left are all zero, they are equally likely.
        count: Number of places to draw, at most all.
        uniform: Function that returns new random numbers.

    Example:
        >>> weighted(np.array([1.0, 2.0, 1.0]), 2, lambda count: np.array([0.5, 0.1]))
        array([1, 0])
    """
    width = math.isqrt(max(len(weights) - 1, 0)) + 1
    left = np.zeros((-(-len(weights) // width), width))
    left.flat[: len(weights)] = weights
    sums, found = np.cumsum(left, axis=1)[:, -1], np.empty(count, np.int64)
    for turn, share in enumerate(uniform(count) if count else ()):
        if not sums.any():
            left.flat[: len(weights)] = 1.0
            left.flat[found[:turn]] = 0.0
            sums = left.sum(axis=1)
        edges = np.cumsum(sums)
        mark = share * edges[-1]
        block = _first_above(edges, mark)
        place = _first_above(np.cumsum(left[block]), mark - (edges[block - 1] if block else 0.0))
        found[turn] = block * width + place
        left[block, place] = 0.0
        sums[block] = np.cumsum(left[block])[-1]
    return found


def _first_above(edges: NDArray[np.float64], mark: float) -> int:
    """Return the first place whose cumulative sum is above a mark; where rounding leaves none, the last that adds."""
    return int(min(np.searchsorted(edges, mark, side="right"), np.searchsorted(edges, edges[-1])))


def within(clients: Sequence[int], client: int) -> bool:
    """Return whether a sequence in ascending order has a client.

    Args:
        clients: Numbers of clients, of which there may be many.
        client: Number of a client.

    Example:
        >>> within([1, 3], 3), within(range(10**9), -1)
        (True, False)
    """
    place = bisect_left(clients, client)
    return place < len(clients) and clients[place] == client
