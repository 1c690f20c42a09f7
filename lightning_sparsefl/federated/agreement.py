"""Whether all ranks hold the same server, told by a checksum of each."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import RanksDisagree
from lightning_sparsefl.federated.process import Ranks
from lightning_sparsefl.types import ServerState


def checksum(value: Any, start: int = 0) -> int:
    """CRC-32 of nested values, from names, types, shapes and bytes; the order of a mapping's names does not matter.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.
        start: The checksum of what stands before.

    Example:
        >>> checksum({"a": 1, "b": torch.ones(2)}) == checksum({"b": torch.ones(2), "a": 1})
        True
        >>> checksum(torch.zeros(2)) == checksum(-torch.zeros(2))
        False
    """
    if isinstance(value, Tensor):
        start = zlib.crc32(repr((value.dtype, tuple(value.shape))).encode(), start)
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(flat.numpy().data, start)
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            start = checksum(value[name], zlib.crc32(repr(name).encode(), start))
        return start
    if isinstance(value, list | tuple):
        for item in value:
            start = checksum(item, start)
        return start
    return zlib.crc32(repr(value).encode(), start)


def agree(server: ServerState, observed: Mapping[int, Any], ranks: Ranks) -> list[float]:
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
        waited: As :func:`agree` returned it.

    Example:
        >>> idle([0.0, 3.0])
        {'time/idle': 1.5, 'time/idle/rank_0': 0.0, 'time/idle/rank_1': 3.0}
    """
    each = {f"time/idle/rank_{rank}": seconds for rank, seconds in enumerate(waited)}
    return {"time/idle": sum(waited) / len(waited), **(each if len(waited) > 1 else {})}
