"""Records in memory; on disk, each commit writes what changed into one file of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.record_store import Packed, RecordStore, StoredRecords, Versions
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.federated.storage.shards import open_shards, parsed

Index = dict[int, dict[int, list[int]]]
"""By client and version: round and rank of the commit whose file holds it."""


class _Part(NamedTuple):
    """What one rank wrote in a commit."""

    versions: Mapping[int, list[int]]
    """Versions by client."""
    checksum: str | None
    """Checksum of the file; None if the rank had nothing to write."""


class MemoryStore(RecordStore):
    """Keeps records in memory, masks packed to one bit a weight.

    Args:
        name: Name of the store.
        ranks: Processes of the run.
        divided: Whether each rank keeps the records of its own clients.
    """

    def __init__(self, name: str, ranks: Ranks, divided: bool = False) -> None:
        super().__init__(name, ranks, divided)
        self._versions: dict[int, Versions] = {}
        self._changed: set[tuple[int, int]] = set()
        self._index: Index = {}
        self._checksums: dict[str, str] = {}
        self._files_before: set[str] = set()

    def get(self, client: int, at: int | None = None) -> Packed | None:
        """Return a client's record; see :class:`RecordStore`."""
        versions = self._versions.get(client, {})
        version = newest(versions, at)
        return None if version is None else versions[version]

    def put(self, client: int, packed: Packed, version: int) -> None:
        """Add a version of a client's record; see :class:`RecordStore`."""
        self._versions[client] = self._asked_for({**self._versions.get(client, {}), version: packed})
        self._changed.add((client, version))

    def pin(self, round: int | None) -> None:
        """Keep the versions of a round available; see :class:`RecordStore`."""
        super().pin(round)
        self._versions = {client: self._asked_for(versions) for client, versions in self._versions.items()}

    def _asked_for(self, versions: Versions) -> Versions:
        """Leave out versions that are neither the newest nor that of the pinned round."""
        wanted = {newest(versions), None if self.pinned is None else newest(versions, self.pinned)}
        return {version: packed for version, packed in versions.items() if version in wanted}

    def clients(self, at: int | None = None) -> Iterable[int]:
        """Return the numbers of the clients that have a record; see :class:`RecordStore`."""
        return sorted(client for client, versions in self._versions.items() if newest(versions, at) is not None)

    def records(self) -> dict[int, Versions]:
        """Return all records of this rank; see :class:`RecordStore`."""
        return {client: self._asked_for(versions) for client, versions in self._versions.items()}

    def conclude(self, parts: Sequence[_Part], folder: Path, round: int) -> StoredRecords:
        """Note which files hold which versions; see :class:`RecordStore`."""
        if not any(round == place[0] for places in self._index.values() for place in places.values()):
            self._files_before = files_of(self._index, self.name)  # else the same round is committed again
        for rank, part in enumerate(parts):
            for client, versions in part.versions.items():
                self._index.setdefault(client, {}).update({version: [round, rank] for version in versions})
            if part.checksum is not None:
                self._checksums[file_name(self.name, round, rank)] = part.checksum
        self._index = {client: self._indexed(versions) for client, versions in self._index.items()}
        named = files_of(self._index, self.name)
        self._checksums = {name: checksum for name, checksum in self._checksums.items() if name in named}
        return StoredRecords(self._index, self._checksums)

    def _indexed(self, versions: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Leave out versions that nothing asks for any more; the same on all ranks."""
        wanted = {newest(versions), None if self.pinned is None else newest(versions, self.pinned)}
        return {version: place for version, place in versions.items() if version in wanted}

    def write(self, folder: Path, round: int) -> _Part:
        """Write what changed into one file of this rank; see :class:`RecordStore`."""
        writes = self.divided or self.ranks.first
        due = sorted((client, version) for client, version in self._changed if version <= round) if writes else []
        content: dict[int, Versions] = defaultdict(dict)
        for client, version in due:
            if version in self._versions[client]:
                content[client][version] = self._versions[client][version]
        self._changed = {(client, version) for client, version in self._changed if version > round}
        if not content:
            return _Part({}, None)
        write_atomically(folder / file_name(self.name, round, self.ranks.rank), dict(content))
        return _Part({client: list(versions) for client, versions in content.items()}, fingerprint(content))

    def discard_left_over(self, folder: Path, before: StoredRecords | None) -> None:
        """Delete files that a killed run left; see :class:`RecordStore`."""
        if before is not None:
            self._files_before = files_of(before.index, self.name) if isinstance(before.index, Mapping) else set()
            self.discard_unreferenced(folder)

    def discard_unreferenced(self, folder: Path) -> None:
        """Delete files that no checkpoint names; see :class:`RecordStore`."""
        needed = files_of(self._index, self.name) | self._files_before
        for path in folder.glob(f"{self.name}-*.pt"):
            if path.name not in needed:
                path.unlink()

    def _keeps(self, client: int) -> bool:
        """Return whether this rank keeps a client's records."""
        return not self.divided or self.home(client) == self.ranks.rank

    def load(self, stored: StoredRecords, folder: Path, moved: bool = False) -> None:
        """Replace the content by a checkpoint's records; see :class:`RecordStore`."""
        from_files = isinstance(stored.index, Mapping)
        found = read_stored(stored, folder, self.name, self.run, self._keeps)
        unwritten = set(stored.records) if from_files and not moved else set(found)
        self._versions = found
        self._changed = {(client, version) for client in unwritten & set(found) for version in found[client]}
        self._index, self._checksums = {}, {}
        if from_files and not moved:
            self._index = {client: dict(places) for client, places in stored.index.items()}
            self._checksums = dict(stored.checksums)


def newest(versions: Iterable[int], at: int | None = None) -> int | None:
    """Return the newest version of a round or before, or None.

    Example:
        >>> newest([1, 4, 9]), newest([1, 4, 9], at=5), newest([4], at=3)
        (9, 4, None)
    """
    return max((version for version in versions if at is None or version <= at), default=None)


def file_name(name: str, round: int, rank: int) -> str:
    """Return the name of the file that a rank writes in a commit.

    Example:
        >>> file_name("server", 12, 0)
        'server-000012-000.pt'
    """
    return f"{name}-{round:06d}-{rank:03d}.pt"


def files_of(index: Mapping[int, Mapping[int, list[int]]], name: str) -> set[str]:
    """Return the names of the files that an index refers to.

    Example:
        >>> files_of({3: {1: [1, 0]}, 4: {1: [1, 0]}}, "nodes")
        {'nodes-000001-000.pt'}
    """
    return {file_name(name, round, rank) for places in index.values() for round, rank in places.values()}


def read_stored(
    stored: StoredRecords, folder: Path, name: str, run: str, wanted: Callable[[int], bool] = lambda client: True
) -> dict[int, Versions]:
    """Read the records that a checkpoint refers to, from files or from databases, or holds itself.

    Args:
        stored: Part of the checkpoint.
        folder: Folder of the record files.
        name: Name of the store.
        run: Identifier of the run.
        wanted: Whether a client's record is asked for.

    Raises:
        CheckpointMismatch: If a file is missing, damaged or of another run.
    """
    if isinstance(stored.index, Mapping):
        own = {client: dict(versions) for client, versions in stored.records.items() if wanted(client)}
        return {**own, **_read_files(stored, folder, name, wanted)}
    at, _ = parsed(stored.index)
    found = {}
    for database in open_shards(stored, folder, name, run).values():
        with closing(database):
            found.update({client: database.versions(client, at) for client in database.clients(at) if wanted(client)})
    return dict(sorted(found.items()))


def _read_files(stored: StoredRecords, folder: Path, name: str, wanted: Callable[[int], bool]) -> dict[int, Versions]:
    found: dict[int, Versions] = defaultdict(dict)
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for client, places in stored.index.items():
        for version, (round, rank) in places.items():
            if wanted(client):
                by_file[file_name(name, int(round), int(rank))].append((client, version))
    for file, entries in sorted(by_file.items()):
        content = load_plain(folder / file)
        if fingerprint(content) != stored.checksums.get(file):
            raise CheckpointMismatch(
                f"{folder / file} is damaged or of another run: its content is not what the checkpoint was written "
                "with; choose another `ckpt_path`."
            )
        for client, version in entries:
            found[client][version] = content[client][version]
    return dict(found)
