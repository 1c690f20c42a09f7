"""Who takes part: a function of the seed and the round, so that a resumed run needs no replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_sparsefl.seeds import generator


def uniform_cohort(seed: int, round: int, clients: Sequence[int], count: int) -> list[int]:
    """Clients of a round, drawn uniformly without replacement, in ascending order.

    Example:
        >>> uniform_cohort(0, 0, range(5), 5)
        [0, 1, 2, 3, 4]
        >>> uniform_cohort(0, 1, range(100), 10) != uniform_cohort(0, 2, range(100), 10)
        True
    """
    return _drawn(clients, count, seed, round, "cohort")


def evaluated_clients(seed: int, clients: Sequence[int], count: int | str) -> list[int]:
    """Clients that an evaluation scores: all of them, or one fixed draw.

    Example:
        >>> evaluated_clients(0, range(3), "all"), len(evaluated_clients(0, range(100), 7))
        ([0, 1, 2], 7)
    """
    if count == "all" or int(count) >= len(clients):
        return list(clients)
    return _drawn(clients, int(count), seed, "evaluated clients")


def split_unseen(seed: int, num_clients: int, count: int) -> tuple[list[int], list[int]]:
    """The clients that train, and those that a run holds out of training, by one fixed draw.

    Example:
        >>> training, unseen = split_unseen(0, 5, 2)
        >>> len(unseen), sorted(training + unseen)
        (2, [0, 1, 2, 3, 4])
    """
    unseen = _drawn(range(num_clients), count, seed, "unseen clients")
    return sorted(set(range(num_clients)).difference(unseen)), unseen


def _drawn(clients: Sequence[int], count: int, *key: int | str) -> list[int]:
    order = torch.randperm(len(clients), generator=generator(*key))
    return sorted(clients[i] for i in order[:count].tolist())
