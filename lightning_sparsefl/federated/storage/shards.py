"""Shards of a store on disk: databases that divide the clients among them, and how a checkpoint names them.

The shard of a client is its number modulo the number of shards, which is the number of ranks with which the run began
and stays as it is. A shard has one owner, the rank that writes it: its number modulo the number of ranks, which may be
another one after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.record_store import StoredRecords

Shards = dict[int, RecordDatabase]
"""Open databases by number of the shard."""
_MOST_SHARDS = 2**16
"""Largest number of shards that is accepted from a checkpoint."""


def shard_name(name: str, shard: int) -> str:
    """Return the name of a shard.

    Args:
        name: Name of the store.
        shard: Number of the shard.

    Example:
        >>> shard_name("nodes", 3)
        'nodes-003'
    """
    return f"{name}-{shard:03d}"


def shards_of(name: str, folder: Path) -> dict[int, Path]:
    """Return the files of the shards that a folder contains, by their numbers.

    Args:
        name: Name of the store.
        folder: Folder of the files.
    """
    found = {path.stem.removeprefix(f"{name}-"): path for path in folder.glob(f"{name}-*.sqlite")}
    return {int(number): path for number, path in found.items() if number.isdecimal()}


def reference(round: int, count: int, sums: Mapping[int, Mapping[int, str]]) -> StoredRecords:
    """Return how a checkpoint refers to the shards of a commit.

    Args:
        round: Number of finished rounds.
        count: Number of shards.
        sums: Sums over the records of each shard, by round.

    Example:
        >>> reference(4, 2, {0: {4: "a7"}, 1: {4: "05"}})
        StoredRecords(index=[4, 2], checksums={'0/4': 'a7', '1/4': '05'}, records={})
    """
    checksums = {f"{shard}/{view}": total for shard in sorted(sums) for view, total in sums[shard].items()}
    return StoredRecords([round, count], checksums)


def parsed(index: Any) -> tuple[int, int]:
    """Return the round and the number of shards of a checkpoint's reference.

    Args:
        index: Index of the reference.

    Raises:
        CheckpointMismatch: If it is something else.

    Example:
        >>> parsed([4, 2])
        (4, 2)
    """
    if isinstance(index, list) and len(index) == 2 and all(type(number) is int for number in index):
        round, count = index
        if round >= 0 and 1 <= count <= _MOST_SHARDS:
            return round, count
    raise CheckpointMismatch(
        f"The checkpoint refers to the clients' records by {str(index)[:40]}; expected a round and a number of shards: "
        "it is damaged, or of another version; choose another `ckpt_path`."
    )


def open_shards(
    stored: StoredRecords, folder: Path, name: str, run: str, wanted: Callable[[int], bool] = lambda shard: True
) -> Shards:
    """Open the shards that a checkpoint refers to, and check that they have the records it was written with.

    Args:
        stored: Part of the checkpoint.
        folder: Folder of the files.
        name: Name of the store.
        run: Identifier of the run.
        wanted: Whether a shard is asked for.

    Raises:
        CheckpointMismatch: If a file is missing or of another run, or a row was deleted, renumbered or replaced.
    """
    round, count = parsed(stored.index)
    sums: dict[int, dict[int, str]] = {shard: {round: ""} for shard in range(count) if wanted(shard)}
    for key, total in stored.checksums.items():
        shard, view = map(int, key.split("/"))
        if shard in sums:
            sums[shard][view] = total
    with ExitStack() as opened:
        shards = {}
        for shard, expected in sums.items():
            shards[shard] = RecordDatabase(folder, shard_name(name, shard))
            opened.callback(shards[shard].close)
            shards[shard].require(round, run)
            shards[shard].require_sums(expected)
        opened.pop_all()
    return shards
