"""Overlap of the masks of clients, in a module that does not import matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST_CLIENTS = 64
"""Maximum number of clients of which all pairs are compared."""
_CHUNK = 1 << 13
"""Packed bytes per client in one matrix product: 16 MiB of float32 for 64 clients, with exact sums."""


def mask_overlap(packed: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Compute the Jaccard overlap of the masks of each pair of clients.

    The definition is that of :func:`lightning_sparsefl.sparse.masks.overlap`.

    Args:
        packed: Masks of each client by tensor name, packed by :func:`lightning_sparsefl.sparse.masks.pack`.

    Returns:
        Overlaps in [0, 1], float64 of shape (clients, clients).
    """
    both = torch.zeros(len(packed), len(packed), dtype=torch.float64)
    either = torch.zeros_like(both)
    for name in dict.fromkeys(name for masks in packed for name in masks):
        holders = torch.tensor([row for row, masks in enumerate(packed) if name in masks])
        common = _common_bits(torch.stack([masks[name] for masks in packed if name in masks]))
        kept = common.diagonal()  # number of positions that each client keeps
        both[holders[:, None], holders] += common
        either[holders[:, None], holders] += kept[:, None] + kept - common
    return torch.where(either > 0, both / either.clamp_min(1), 1.0)


def _common_bits(packed: Tensor) -> Tensor:
    """Count the bits that each pair of rows has in common: uint8 (rows, bytes) to float64 (rows, rows)."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    common = torch.zeros(len(packed), len(packed), dtype=torch.float64)
    for part in packed.split(_CHUNK, dim=1):
        # Unpack to one float per bit; the product of two rows then counts the bits that are set in both.
        bits = ((part.unsqueeze(-1) >> places) & 1).flatten(1).float()
        common += (bits @ bits.T).cpu()
    return common


def overlap_rows(clients: Sequence[int], overlaps: Tensor, round: int) -> list[dict[str, float]]:
    """Return one row for each pair of clients, for a run's `overlap.csv`.

    Args:
        clients: Numbers of the clients.
        overlaps: Overlaps in the order of `clients`, of shape (clients, clients).
        round: Number of the round.

    Example:
        >>> overlap_rows([3, 5], torch.tensor([[1.0, 0.5], [0.5, 1.0]]), round=7)
        [{'round': 7, 'client': 3, 'other': 5, 'overlap': 0.5}]
    """
    table = overlaps.tolist()
    pairs = [(row, column) for row in range(len(clients)) for column in range(row + 1, len(clients))]
    return [{"round": round, "client": clients[a], "other": clients[b], "overlap": table[a][b]} for a, b in pairs]
