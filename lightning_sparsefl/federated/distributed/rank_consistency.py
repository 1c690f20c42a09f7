"""Check by checksums that all ranks have the same server state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sparsefl.errors import RanksDisagree
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.exchange.hashing import checksum
from lightning_sparsefl.types import ServerState


def check_ranks_agree(
    server: ServerState, observed: Mapping[int, Any], ranks: Ranks, further: Mapping[str, Any] | None = None
) -> list[float]:
    """Compare the server states of all ranks after a round.

    Args:
        server: Server state after the round.
        observed: State that the server has newly stored about clients, by client.
        ranks: Ranks of the run.
        further: Other parts of the state, by name, as plain values.

    Returns:
        Time that each rank waited for the clients of other ranks in the round, in seconds.

    Raises:
        RanksDisagree: If the state of a rank differs from that of the first one.
    """
    if ranks.size == 1:
        return [0.0]
    parts: dict[str, Any] = {"weights": server.weights, "masks": server.masks, "extra": server.extra}
    parts |= {"shared": observed, **(further or {})}
    checksums = {name: checksum(part) for name, part in parts.items()}
    reports = ranks.gather((checksums, ranks.waited))
    first = reports[0][0]
    for rank, (theirs, _) in enumerate(reports):
        differing = [name for name in first if theirs[name] != first[name]]
        if differing:
            raise RanksDisagree(differing, round=server.round - 1, rank=rank)
    return [waited for _, waited in reports]


def idle(waited: list[float]) -> dict[str, float]:
    """Return the metrics of idle time: the mean over ranks and, with several ranks, the time of each.

    Args:
        waited: Seconds by rank, as returned by :func:`check_ranks_agree`.

    Example:
        >>> idle([0.0, 3.0])
        {'time/idle': 1.5, 'time/idle/rank_0': 0.0, 'time/idle/rank_1': 3.0}
    """
    each = {f"time/idle/rank_{rank}": seconds for rank, seconds in enumerate(waited)}
    return {"time/idle": sum(waited) / len(waited), **(each if len(waited) > 1 else {})}
