"""Records in a database of the run folder; memory holds only what changed since the last commit.

Every rank reads the database that rank 0 writes, so all nodes must see the run folder.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.storage.memory_store import newest, read_stored
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.record_store import Packed, RecordStore, StoredRecords, Versions

_MOST_BYTES_OF_A_COPY = 2**30


class SqliteStore(RecordStore):
    """Reads records from the database when they are asked for.

    Args:
        name: Name of the store.
        ranks: Processes of the run.
        divided: Whether each rank keeps the changed records of its own clients until the commit.
    """

    def __init__(self, name: str, ranks: Ranks, divided: bool = False) -> None:
        super().__init__(name, ranks, divided)
        self._database: RecordDatabase | None = None
        self._committed = -1
        self._new: dict[int, Versions] = {}
        """What changed since the last commit, by client and version."""

    def get(self, client: int, at: int | None = None) -> Packed | None:
        """Return a client's record; see :class:`RecordStore`."""
        versions = self._new.get(client, {})
        version = newest(versions, at)
        if version is not None:
            return versions[version]
        return None if self._database is None else self._database.read(client, self._stored(at))

    def _stored(self, at: int | None) -> int:
        """Return the round to read the database at; what it holds of later rounds is left over by a crash."""
        return self._committed if at is None else min(at, self._committed)

    def put(self, client: int, packed: Packed, version: int) -> None:
        """Add a version of a client's record; see :class:`RecordStore`."""
        versions = self._new.get(client, {})
        pinned = None if self.pinned is None else newest(versions, self.pinned)
        self._new[client] = {**{v: p for v, p in versions.items() if v == pinned}, version: packed}

    def clients(self, at: int | None = None) -> Iterable[int]:
        """Return the numbers of the clients that have a record, reading the database as it goes."""
        stored = iter(()) if self._database is None else self._database.clients(self._stored(at))
        return _merged(stored, sorted(c for c, versions in self._new.items() if newest(versions, at) is not None))

    def records(self) -> dict[int, Versions]:
        """Return all records of this rank; see :class:`RecordStore`.

        Raises:
            InvalidOption: If the database is too large to be copied.
        """
        size = 0 if self._database is None else self._database.size()
        if size > _MOST_BYTES_OF_A_COPY:
            raise InvalidOption(
                f"A checkpoint that stands alone would hold {size / 2**30:.1f} GiB of clients' records; expected at "
                "most 1: set `save_weights_only` of `ModelCheckpoint`, or leave it out; `last.ckpt` is enough to go on."
            )
        return {client: self._copy_of(client) for client in self.clients()}

    def _copy_of(self, client: int) -> Versions:
        stored = {} if self._database is None else self._database.versions(client, self._committed)
        versions = {**stored, **self._new.get(client, {})}
        wanted = {newest(versions), None if self.pinned is None else newest(versions, self.pinned)}
        return {version: packed for version, packed in versions.items() if version in wanted}

    def commit(self, folder: Path, round: int) -> StoredRecords:
        """Write what changed in one transaction of rank 0; see :class:`RecordStore`."""
        due = self._due(round)
        sums = self.ranks.share(lambda: self._write(folder, round, due) if self.ranks.first else {})[0]
        self.ranks.share(lambda: None if self.ranks.first else self._follow(folder, round))
        self._committed = round
        self._new = {c: later for c, v in self._new.items() if (later := {r: p for r, p in v.items() if r > round})}
        return StoredRecords(round, sums)

    def _due(self, round: int) -> dict[int, Versions]:
        """Return what is to be written; in a divided store, rank 0 gets the others' records."""
        mine = {c: {r: p for r, p in versions.items() if r <= round} for c, versions in self._new.items()}
        if not self.divided or self.ranks.size == 1:
            return mine
        parts = self.ranks.exchange([mine if rank == 0 else {} for rank in range(self.ranks.size)])
        return {client: versions for part in parts for client, versions in part.items()}

    def _write(self, folder: Path, round: int, due: Mapping[int, Versions]) -> dict[str, str]:
        if self._database is None or self._database.path.parent.resolve() != folder.resolve():
            old = self._database
            new = RecordDatabase(folder, self.name, create=True) if old is None else old.copy_to(folder)
            self._database = new
        changed = ((c, r, packed) for c in sorted(due) for r, packed in sorted(due[c].items()))
        pins = () if self.pinned is None else (self.pinned,)
        return self._database.commit(self.run, self._committed, round, changed, pins)

    def _follow(self, folder: Path, round: int) -> None:
        """Open the database that rank 0 has committed to."""
        try:
            # opened anew, since the folder may be another one
            self._database = RecordDatabase.at(folder, self.name, round, self.run)
        except CheckpointMismatch as error:
            raise InvalidOption(
                f"`federation.store: disk` needs a run folder that all ranks see, but rank {self.ranks.rank} does not "
                f"see what rank 0 wrote in {folder}; set `trainer.default_root_dir` to a shared folder, or "
                "`federation.store: ram`."
            ) from error

    def discard_unreferenced(self, folder: Path) -> None:
        """Do nothing: the next commit deletes what no checkpoint needs."""

    def load(self, stored: StoredRecords, folder: Path, moved: bool = False) -> None:
        """Replace the content by a checkpoint's records; see :class:`RecordStore`.

        Records of the other kind of store count as changed, so that the next commit writes them. Of the database, the
        list of records and the contents of the newest commit are checked now, and older contents as they are read.
        """
        if isinstance(stored.index, Mapping):
            found = read_stored(stored, folder, self.name, self.run)
            mine = (c for c in found if not self.divided or self.home(c) == self.ranks.rank)
            self._new = {client: dict(found[client]) for client in mine}
            self._database, self._committed = None, -1
        else:
            database = RecordDatabase.stored(stored, folder, self.name, self.run)
            database.require_newest_whole(stored.index)
            self._database, self._committed, self._new = database, stored.index, {}


def _merged(first: Iterator[int], second: Iterable[int]) -> Iterator[int]:
    """Merge two ascending sequences without repeats."""
    last = None
    for client in heapq.merge(first, second):
        if client != last:
            yield client
        last = client
