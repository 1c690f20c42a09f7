"""Whether all ranks hold the same server, told by a checksum of each."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import reduce
from typing import Any

from lightning_sparsefl.errors import RanksDisagree
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.storage.atomic_files import pieces
from lightning_sparsefl.types import ServerState


def checksum(value: Any) -> int:
    """CRC-32 of nested values, from names, types, shapes and bytes; the order of a mapping's names does not matter.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.

    Example:
        >>> import torch
        >>> checksum({"a": 1, "b": torch.ones(2)}) == checksum({"b": torch.ones(2), "a": 1})
        True
        >>> checksum(torch.zeros(2)) == checksum(-torch.zeros(2))
        False
    """
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces(value), 0)


def check_ranks_agree(server: ServerState, observed: Mapping[int, Any], ranks: Ranks) -> list[float]:
    """Compare the ranks' servers after a round.

    Args:
        server: After the round.
        observed: What the server newly keeps about clients, by client.
        ranks: The processes.

    Returns:
        Seconds that each rank waited for the others' clients in the round.

    Raises:
        RanksDisagree: If a rank holds another server than the first one.
    """
    if ranks.size == 1:
        return [0.0]
    parts = {"weights": server.weights, "masks": server.masks, "extra": server.extra, "shared": observed}
    checksums = {name: checksum(part) for name, part in parts.items()}
    reports = ranks.gather((checksums, ranks.waited))
    first = reports[0][0]
    for rank, (theirs, _) in enumerate(reports):
        differing = [name for name in first if theirs[name] != first[name]]
        if differing:
            raise RanksDisagree(differing, round=server.round - 1, rank=rank)
    return [waited for _, waited in reports]


def idle(waited: list[float]) -> dict[str, float]:
    """The logged keys: the mean over ranks, and each rank's where there are several.

    Args:
        waited: As :func:`check_ranks_agree` returned it.

    Example:
        >>> idle([0.0, 3.0])
        {'time/idle': 1.5, 'time/idle/rank_0': 0.0, 'time/idle/rank_1': 3.0}
    """
    each = {f"time/idle/rank_{rank}": seconds for rank, seconds in enumerate(waited)}
    return {"time/idle": sum(waited) / len(waited), **(each if len(waited) > 1 else {})}
