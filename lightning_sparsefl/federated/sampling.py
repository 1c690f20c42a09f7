"""Who takes part: a function of the seed and the round, so that a resumed run needs no replay."""

from __future__ import annotations

import torch

from lightning_sparsefl.seeds import generator


def uniform_cohort(seed: int, round: int, num_clients: int, count: int) -> list[int]:
    """Clients of a round, drawn uniformly without replacement, in ascending order.

    Example:
        >>> uniform_cohort(0, 0, 5, 5)
        [0, 1, 2, 3, 4]
        >>> uniform_cohort(0, 1, 100, 10) == uniform_cohort(0, 1, 100, 10) != uniform_cohort(0, 2, 100, 10)
        True
    """
    order = torch.randperm(num_clients, generator=generator(seed, round, "cohort"))
    return sorted(order[:count].tolist())


def evaluated_clients(seed: int, num_clients: int, count: int | str) -> list[int]:
    """Clients that an evaluation scores: all of them, or one fixed draw.

    Example:
        >>> evaluated_clients(0, 3, "all"), len(evaluated_clients(0, 100, 7))
        ([0, 1, 2], 7)
    """
    if count == "all" or int(count) >= num_clients:
        return list(range(num_clients))
    order = torch.randperm(num_clients, generator=generator(seed, "evaluated clients"))
    return sorted(order[: int(count)].tolist())
