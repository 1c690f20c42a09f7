"""Records in databases of the run folder; memory holds only what changed since the last commit.

Each rank writes the shards that it owns. What the server keeps is read by all ranks, so all nodes must see the run
folder.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.storage.memory_store import newest, read_stored
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.record_store import Packed, RecordStore, StoredRecords, Versions
from lightning_sparsefl.federated.storage.shards import (
    Shards,
    open_shards,
    parsed,
    reference,
    shard_name,
    shards_of,
)

_MOST_BYTES_OF_A_COPY = 2**30


class SqliteStore(RecordStore):
    """Reads records from the databases when they are asked for.

    Args:
        name: Name of the store.
        ranks: Processes of the run.
        divided: Whether each rank keeps the records of the shards that it owns.
    """

    def __init__(self, name: str, ranks: Ranks, divided: bool = False) -> None:
        super().__init__(name, ranks, divided)
        self._count = ranks.size
        """Number of shards: that of the ranks with which the run began."""
        self._shards: Shards = {}
        """Databases that this rank reads: its own, and in a store that is not divided those of the others."""
        self._committed = -1
        self._new: dict[int, Versions] = {}
        """What changed since the last commit, by client and version."""

    def home(self, client: int) -> int:
        """Return the rank that owns a client's shard; see :class:`RecordStore`."""
        return self._owner(client % self._count)

    def _owner(self, shard: int) -> int:
        return shard % self.ranks.size

    def _owns(self, shard: int) -> bool:
        return self._owner(shard) == self.ranks.rank

    def get(self, client: int, at: int | None = None) -> Packed | None:
        """Return a client's record; see :class:`RecordStore`.

        Raises:
            CheckpointMismatch: If the record is damaged, or the run went on elsewhere and may have deleted it.
        """
        versions = self._new.get(client, {})
        version = newest(versions, at)
        if version is not None:
            return versions[version]
        database = self._shards.get(client % self._count)
        if database is None or self._committed < 0:
            return None
        record: Packed | None = database.read(client, self._stored(at))
        database.require_served(self._committed)  # after the read: what is served now was served then
        return record

    def _stored(self, at: int | None) -> int:
        """Return the round to read the databases at; what they hold of later rounds is left over by a crash."""
        return self._committed if at is None else min(at, self._committed)

    def put(self, client: int, packed: Packed, version: int) -> None:
        """Add a version of a client's record; see :class:`RecordStore`."""
        versions = self._new.get(client, {})
        pinned = None if self.pinned is None else newest(versions, self.pinned)
        self._new[client] = {**{v: p for v, p in versions.items() if v == pinned}, version: packed}

    def clients(self, at: int | None = None) -> Iterable[int]:
        """Return the numbers of the clients that have a record, reading the databases as it goes."""
        stored = [database.clients(self._stored(at)) for database in self._shards.values()]
        changed = sorted(c for c, versions in self._new.items() if newest(versions, at) is not None)
        return _merged(*stored, changed)

    def records(self) -> dict[int, Versions]:
        """Return all records of this rank; see :class:`RecordStore`.

        Raises:
            InvalidOption: If the databases are too large to be copied.
        """
        size = sum(database.size() for database in self._shards.values())
        if size > _MOST_BYTES_OF_A_COPY:
            raise InvalidOption(
                f"A checkpoint that stands alone would hold {size / 2**30:.1f} GiB of clients' records; expected at "
                "most 1: set `save_weights_only` of `ModelCheckpoint`, or leave it out; `last.ckpt` is enough to go on."
            )
        return {client: self._copy_of(client) for client in self.clients()}

    def _copy_of(self, client: int) -> Versions:
        database = self._shards.get(client % self._count)
        stored = {} if database is None else database.versions(client, self._committed)
        versions = {**stored, **self._new.get(client, {})}
        wanted = {newest(versions), None if self.pinned is None else newest(versions, self.pinned)}
        return {version: packed for version, packed in versions.items() if version in wanted}

    def conclude(self, parts: Sequence[dict[int, dict[int, str]]], folder: Path, round: int) -> StoredRecords:
        """Open what other ranks have written, and forget what is on disk; see :class:`RecordStore`."""
        if not self.divided and self.ranks.size > 1:
            self.ranks.share(lambda: self._follow(folder, round))
        self._committed = round
        self._new = {c: later for c, v in self._new.items() if (later := {r: p for r, p in v.items() if r > round})}
        return reference(round, self._count, {shard: sums for part in parts for shard, sums in part.items()})

    def write(self, folder: Path, round: int) -> dict[int, dict[int, str]]:
        """Write what changed in one transaction for each shard of this rank; return their sums by round."""
        changed: dict[int, list[tuple[int, int, Packed]]] = defaultdict(list)
        for client, versions in sorted(self._new.items()):
            changed[client % self._count] += [(client, r, versions[r]) for r in sorted(versions) if r <= round]
        pins = () if self.pinned is None else (self.pinned,)
        sums = {}
        for shard in filter(self._owns, range(self._count)):
            database = self._shards[shard] = self._own(shard, folder)
            sums[shard] = database.commit(self.run, self._committed, round, changed[shard], pins)
        return sums

    def _own(self, shard: int, folder: Path) -> RecordDatabase:
        """Return a database to write to, which is created, or copied if the run goes on in another folder."""
        database = self._shards.get(shard)
        if database is None:
            return RecordDatabase(folder, shard_name(self.name, shard), create=True)
        return database if _is_in(database, folder) else database.copy_to(folder)

    def _follow(self, folder: Path, round: int) -> None:
        """Open the databases that other ranks have committed to."""
        for shard in range(self._count):
            if not self._owns(shard):
                self._shards[shard] = self._visible(shard, folder, round)

    def _visible(self, shard: int, folder: Path, round: int) -> RecordDatabase:
        """Return the database of another rank, opened anew if the run goes on in another folder."""
        try:
            database = self._shards.get(shard)
            if database is None or not _is_in(database, folder):
                database = RecordDatabase(folder, shard_name(self.name, shard))
            database.require(round, self.run)
        except CheckpointMismatch as error:
            raise InvalidOption(
                f"`federation.store: disk` needs a run folder that all ranks see, but rank {self.ranks.rank} does not "
                f"see what rank {self._owner(shard)} wrote in {folder}; set `trainer.default_root_dir` to a shared "
                "folder, or `federation.store: ram`."
            ) from error
        return database

    def discard_unreferenced(self, folder: Path) -> None:
        """Delete shards that a run left which had more of them; see :class:`RecordStore`.

        Rows that no checkpoint needs are deleted by the next commit.
        """
        for shard, path in shards_of(self.name, folder).items():
            if shard >= self._count:
                path.unlink()

    def load(self, stored: StoredRecords, folder: Path, moved: bool = False) -> None:
        """Replace the content by a checkpoint's records; see :class:`RecordStore`.

        Records of the other kind of store count as changed, so that the next commit writes them. Of the databases, the
        lists of records and the contents of the newest commit are checked now, and older contents as they are read.
        """
        if isinstance(stored.index, Mapping):
            self._count = self.ranks.size
            mine = (lambda client: self.home(client) == self.ranks.rank) if self.divided else (lambda client: True)
            found = read_stored(stored, folder, self.name, self.run, mine)
            self._shards, self._committed, self._new = {}, -1, found
            return
        shards = open_shards(stored, folder, self.name, self.run, self._owns if self.divided else lambda shard: True)
        round, count = parsed(stored.index)
        for database in shards.values():
            database.require_newest_whole(round)
        self._shards, self._count, self._committed, self._new = shards, count, round, {}


def _is_in(database: RecordDatabase, folder: Path) -> bool:
    return database.path.parent.resolve() == folder.resolve()


def _merged(*ascending: Iterable[int]) -> Iterator[int]:
    """Merge ascending sequences without repeats."""
    last = None
    for client in heapq.merge(*ascending):
        if client != last:
            yield client
        last = client
