"""A SQLite database of versioned client records, in which the cost of a commit depends on the changed records only.

The version of a record is the number of finished rounds at the time it was stored. The database serves the newest
commits and the round chosen by `federation.select`; the next commit deletes, in the same transaction, the versions that
none of them needs. Versions that a crash left for a later round are never read, and the next commit deletes them.
"""

from __future__ import annotations

import errno
import io
import sqlite3
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.safe_load import NotPlain, require_plain

_TABLES = {
    "records": "CREATE TABLE records (client INTEGER, round INTEGER, crc INTEGER, content BLOB, "
    "PRIMARY KEY (client, round))",
    "by_round": "CREATE INDEX by_round ON records (round)",
    "superseded": "CREATE TABLE superseded (client INTEGER, round INTEGER, until INTEGER, "
    "PRIMARY KEY (client, round)) WITHOUT ROWID",
    "served": 'CREATE TABLE served ("commit" INTEGER, round INTEGER, PRIMARY KEY ("commit", round)) WITHOUT ROWID',
}
"""`superseded`: versions with the round `until` of the next version. `served`: rounds that each commit may read."""
_NEEDED = "EXISTS (SELECT 1 FROM served WHERE served.round >= superseded.round AND served.round < superseded.until)"
_KEPT_COMMITS = 3
"""Number of commits that are served: two with checkpoints on disk, and the one being written."""


class RecordDatabase:
    """Database of the versions of all records of one store.

    Args:
        folder: Folder of the file.
        name: Name of the store; the file is called ``<name>.sqlite``.
        create: Whether to create the file if it is missing.

    Raises:
        CheckpointMismatch: If the file is missing or not a database of records.
    """

    def __init__(self, folder: Path, name: str, create: bool = False) -> None:
        self.path, self.name = folder / f"{name}.sqlite", name
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_file():
            raise CheckpointMismatch(f"There is no {self.path}, which holds the clients' records (`ckpt_path`).")
        with self._convert_errors():
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            self._database = sqlite3.connect(uri, uri=True, timeout=60.0, check_same_thread=False)
            self.close = weakref.finalize(self, self._database.close)
            # EXTRA makes commits durable; the others prevent the execution of code in a manipulated file
            for pragma in ("synchronous = EXTRA", "trusted_schema = OFF", "cell_size_check = ON"):
                self._database.execute(f"PRAGMA {pragma}")
            self._check_layout(create)

    def _check_layout(self, create: bool) -> None:
        found = dict(self._database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        if create and not found:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.values():
                    database.execute(statement)
        elif found != _TABLES:
            raise CheckpointMismatch(f"{self.path} is not a database of clients' records; choose another `ckpt_path`.")

    @classmethod
    def at(cls, folder: Path, name: str, round: int) -> RecordDatabase:
        """Open the database of a folder, and check that it has the records of a round.

        Args:
            folder: Folder of the file.
            name: Name of the store.
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If the database does not have the records of that round.
        """
        file = cls(folder, name)
        if not file._rows("SELECT 1 FROM served WHERE round = ? LIMIT 1", round):
            file.close()
            raise CheckpointMismatch(
                f"{file.path} does not hold the clients' records of round {round} any more, or not yet; "
                "choose the newest checkpoint beside it (`ckpt_path`)."
            )
        return file

    def read(self, client: int, round: int) -> Any:
        """Return the packed record of a client after a round, or None if it had no record.

        Args:
            client: Number of the client.
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If the record is damaged.
        """
        found = self._rows(
            "SELECT crc, content FROM records WHERE client = ? AND round <= ? ORDER BY round DESC LIMIT 1",
            client,
            round,
        )
        return self._decoded(client, *found[0]) if found else None

    def versions(self, client: int, round: int) -> dict[int, Any]:
        """Return all stored versions of a client's record up to a round.

        Args:
            client: Number of the client.
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If a record is damaged.
        """
        found = self._rows("SELECT round, crc, content FROM records WHERE client = ? AND round <= ?", client, round)
        return {version: self._decoded(client, crc, content) for version, crc, content in found}

    def require_newest_whole(self, round: int) -> None:
        """Read all records written by the commit of a round, which a crash or a full disk would damage first.

        Args:
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If one of the records is damaged.
        """
        earlier = 'SELECT COALESCE(MAX("commit"), ? - 1) FROM served WHERE "commit" < ?'
        ((before,),) = self._rows(earlier, round, round)
        for client, version in self._rows(
            "SELECT client, round FROM records WHERE round > ? AND round <= ?", before, round
        ):
            self.read(client, version)

    def clients(self, round: int = 2**62) -> Iterator[int]:
        """Iterate over the numbers of the clients that had a record after a round, ascending.

        Args:
            round: Number of finished rounds.
        """
        client = -1
        while found := self._rows(
            "SELECT DISTINCT client FROM records WHERE client > ? AND round <= ? ORDER BY client LIMIT 1000",
            client,
            round,
        ):
            for (client,) in found:
                yield client

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.path.stat().st_size

    def commit(self, after: int, round: int, records: Iterable[tuple[int, int, Any]], pins: Iterable[int]) -> None:
        """Write the records that changed since the last commit, in one transaction.

        Args:
            after: Round of the last commit, -1 without one; later rounds in the file are deleted.
            round: Round of this commit.
            records: Triples of client, version (at most `round`) and packed record, by ascending version per client.
            pins: Earlier rounds that this commit's checkpoint may refer to.
        """
        with self._convert_errors(), self._database as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM records WHERE round > ?", (after,))
            database.execute("DELETE FROM superseded WHERE until > ?", (after,))
            database.execute('DELETE FROM served WHERE "commit" > ?', (after,))
            for client, version, packed in records:
                self._insert(database, client, version, _encoded(packed))
            database.executemany(
                "INSERT OR IGNORE INTO served VALUES (?, ?)", [(round, view) for view in {round, *pins}]
            )
            newest = f'SELECT DISTINCT "commit" FROM served ORDER BY "commit" DESC LIMIT {_KEPT_COMMITS}'
            database.execute(f'DELETE FROM served WHERE "commit" NOT IN ({newest})')
            unneeded = f"SELECT client, round FROM superseded WHERE NOT {_NEEDED}"
            database.execute(f"DELETE FROM records WHERE (client, round) IN ({unneeded})")
            database.execute(f"DELETE FROM superseded WHERE NOT {_NEEDED}")

    def _insert(self, database: sqlite3.Connection, client: int, version: int, content: bytes) -> None:
        newest = "SELECT client, round, ? FROM records WHERE client = ? ORDER BY round DESC LIMIT 1"
        database.execute(f"INSERT INTO superseded {newest}", (version, client))
        database.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (client, version, zlib.crc32(content), content))

    def copy_to(self, folder: Path) -> RecordDatabase:
        """Copy the database into another folder, and replace a file of the same name there.

        Args:
            folder: Folder of the copy.
        """
        other = RecordDatabase(folder, self.name, create=True)
        with self._convert_errors():
            self._database.backup(other._database)
        return other

    def _rows(self, query: str, *values: int) -> list[Any]:
        with self._convert_errors():
            return self._database.execute(query, values).fetchall()

    def _decoded(self, client: int, crc: Any, content: Any) -> Any:
        try:
            if zlib.crc32(content) == crc:
                require_plain(io.BytesIO(content))
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error) if isinstance(error, NotPlain) else type(error).__name__
        else:
            reason = "its checksum does not match"
        raise CheckpointMismatch(
            f"{self.path} holds a damaged record of client {client} ({reason}); choose an earlier `ckpt_path`."
        )

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of SQLite to errors of this package."""
        try:
            yield
        except sqlite3.Error as error:
            if "disk is full" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path)) from error
            raise CheckpointMismatch(
                f"{self.path} is damaged, or cannot be used ({error}); choose another `ckpt_path`."
            ) from error


def _encoded(packed: Any) -> bytes:
    """Encode a record with ``torch.save``, so that it loads with ``weights_only=True``."""
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    return buffer.getvalue()
