"""The interface of the stores that keep clients' records in versions.

A version is the number of finished rounds after which a record was so. Resuming, `previous.ckpt` and
`federation.select` ask for older versions: a store keeps the newest one, that of the pinned round, and on disk those
that a checkpoint still names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.storage.disk_full import raise_disk_full

Packed = dict[str, Any]
"""A record as plain values."""
Versions = dict[int, Packed]
"""The records of one client by version."""


@dataclass(frozen=True)
class StoredRecords:
    """How a checkpoint refers to the records of one store; plain values."""

    index: Any = field(default_factory=dict)
    """Which file holds which version, as a mapping; of databases, see :mod:`shards`."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the content of each file, by its name; of databases, sums over the records, by shard and round."""
    records: Mapping[int, Versions] = field(default_factory=dict)
    """The records themselves, in a checkpoint that stands alone."""


class RecordStore(ABC):
    """Keeps the records of clients in versions.

    Args:
        name: Name of the store, the first part of its files' names: ``server`` or ``nodes``.
        ranks: Processes of the run.
        divided: Whether each rank keeps the records of its own clients; otherwise all ranks hold the same records,
            and rank 0 writes them.
    """

    def __init__(self, name: str, ranks: Ranks, divided: bool = False) -> None:
        self.name, self.ranks, self.divided = name, ranks, divided
        self.pinned: int | None = None
        """Round whose versions stay available, besides the newest ones."""
        self.run = ""
        """Identifier of the run, set before records are loaded or committed; a database must have the same one."""

    def pin(self, round: int | None) -> None:
        """Keep the versions of a round available from now on, instead of those of the round that was pinned before.

        Args:
            round: Number of finished rounds; None = the newest versions alone.
        """
        self.pinned = round

    def home(self, client: int) -> int:
        """Return the rank that keeps a client's record, if the store is divided."""
        return client % self.ranks.size

    @abstractmethod
    def get(self, client: int, at: int | None = None) -> Packed | None:
        """Return a client's record.

        Args:
            client: Number of the client.
            at: Number of finished rounds after which the record was so; None = the newest.

        Returns:
            The packed record, or None if the client had none.
        """

    @abstractmethod
    def put(self, client: int, packed: Packed, version: int) -> None:
        """Add a version of a client's record; versions that nothing asks for any more are dropped.

        Args:
            client: Number of the client.
            packed: The record as plain values.
            version: Number of finished rounds, the one of this record included.
        """

    @abstractmethod
    def clients(self, at: int | None = None) -> Iterable[int]:
        """Return the numbers of the clients that have a record, ascending.

        Args:
            at: Number of finished rounds; None = now.
        """

    @abstractmethod
    def records(self) -> dict[int, Versions]:
        """Return all records of this rank that are asked for, for a checkpoint that stands alone.

        Raises:
            InvalidOption: If they are too large to be copied.
        """

    @abstractmethod
    def load(self, stored: StoredRecords, folder: Path, moved: bool = False) -> None:
        """Replace the content by a checkpoint's records, also those of the other kind of store; all or nothing.

        Args:
            stored: Part of the checkpoint.
            folder: Folder of the record files.
            moved: Whether the next commits go to another folder, so that all records must be written there.

        Raises:
            CheckpointMismatch: If a file is missing, damaged or of another run.
        """

    def commit(self, folder: Path, round: int) -> StoredRecords:
        """Write what changed since the last commit; called on all ranks.

        Args:
            folder: Folder of the record files.
            round: Number of finished rounds; later versions are not written.

        Returns:
            The reference for the checkpoint.
        """
        return commit_together([self], folder, round)[0]

    @abstractmethod
    def write(self, folder: Path, round: int) -> Any:
        """Write this rank's part of what changed since the last commit.

        Args:
            folder: Folder of the record files.
            round: Number of finished rounds; later versions are not written.

        Returns:
            What the other ranks need to know of it.
        """

    @abstractmethod
    def conclude(self, parts: Sequence[Any], folder: Path, round: int) -> StoredRecords:
        """Conclude a commit when all ranks have written; called on all ranks.

        Args:
            parts: Results of :meth:`write` by rank.
            folder: Folder of the record files.
            round: Number of finished rounds.

        Returns:
            The reference for the checkpoint.
        """

    @abstractmethod
    def discard_unreferenced(self, folder: Path) -> None:
        """Delete files that neither the last commit nor the one before it names; called on rank 0."""

    def discard_left_over(self, folder: Path, before: StoredRecords | None) -> None:  # noqa: B027 - a default
        """Delete the files that a run left which was killed between a commit and its clean-up.

        Args:
            folder: Folder of the record files.
            before: Reference in the previous checkpoint; None if that one cannot be read.
        """


def commit_together(stores: Sequence[RecordStore], folder: Path, round: int) -> list[StoredRecords]:
    """Commit several stores with one exchange between the ranks, which takes longer than small records do.

    Args:
        stores: Stores of the same ranks.
        folder: Folder of the record files.
        round: Number of finished rounds; later versions are not written.

    Returns:
        The reference of each store for the checkpoint.
    """

    def write() -> list[Any]:
        with raise_disk_full(folder.parent.parent):  # here, since other ranks get the text of an error alone
            return [store.write(folder, round) for store in stores]

    written = stores[0].ranks.share(write)
    return [
        store.conclude(parts, folder, round) for store, parts in zip(stores, zip(*written, strict=True), strict=True)
    ]
