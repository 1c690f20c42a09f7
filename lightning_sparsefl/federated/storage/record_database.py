"""One SQLite file of packed records in versions, which costs per round what changed in it.

A version is the round after which a client's record was so. The file serves the newest commits and the round that
`federation.select` chose: what none of them needs any more goes with the next commit, in the same transaction. What a
crash left of a later round is never looked at, and undone by the next commit.
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

NAME = "records.sqlite"
_TABLES = {
    "records": "CREATE TABLE records (client INTEGER, round INTEGER, crc INTEGER, content BLOB, "
    "PRIMARY KEY (client, round))",
    "by_round": "CREATE INDEX by_round ON records (round)",
    "superseded": "CREATE TABLE superseded (client INTEGER, round INTEGER, until INTEGER, "
    "PRIMARY KEY (client, round)) WITHOUT ROWID",
    "served": 'CREATE TABLE served ("commit" INTEGER, round INTEGER, PRIMARY KEY ("commit", round)) WITHOUT ROWID',
}
"""`superseded`: versions up to the round that has a newer one. `served`: what each commit may still look at."""
_NEEDED = "EXISTS (SELECT 1 FROM served WHERE served.round >= superseded.round AND served.round < superseded.until)"
_KEPT_COMMITS = 3
"""Two whose checkpoints may be on disk, and the one that is written."""


class RecordDatabase:
    """Reads and writes versions of records.

    Args:
        folder: Of the file, which has the name ``records.sqlite``.
        create: Whether to make it where there is none.

    Raises:
        CheckpointMismatch: If it is missing, or not such a file.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self.path = folder / NAME
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_file():
            raise CheckpointMismatch(f"There is no {self.path}, which holds the clients' records (`ckpt_path`).")
        with self._explained():
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            self._database = sqlite3.connect(uri, uri=True, timeout=60.0, check_same_thread=False)
            self.close = weakref.finalize(self, self._database.close)
            # synced so that a commit stays one, also its end; what stands in the file is data and never run
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
            raise CheckpointMismatch(f"{self.path} is no file of clients' records; choose another `ckpt_path`.")

    @classmethod
    def at(cls, folder: Path, round: int) -> RecordDatabase:
        """The file in a folder, if it holds the records as they were after a round.

        Raises:
            CheckpointMismatch: If it does not.
        """
        file = cls(folder)
        if not file._rows("SELECT 1 FROM served WHERE round = ? LIMIT 1", round):
            file.close()
            raise CheckpointMismatch(
                f"{file.path} does not hold the clients' records of round {round} any more, or not yet; "
                "choose the newest checkpoint beside it (`ckpt_path`)."
            )
        return file

    def read(self, client: int, round: int) -> Any:
        """A client's packed record as it was after a round; None if there was none.

        Raises:
            CheckpointMismatch: If it is torn.
        """
        found = self._rows(
            "SELECT crc, content FROM records WHERE client = ? AND round <= ? ORDER BY round DESC LIMIT 1",
            client,
            round,
        )
        return self._decoded(client, *found[0]) if found else None

    def require_newest_whole(self, round: int) -> None:
        """Read what the commit of a round wrote, all of it, since a crash or a full disk spoils the newest first.

        Raises:
            CheckpointMismatch: If a record of it is torn.
        """
        earlier = 'SELECT COALESCE(MAX("commit"), ? - 1) FROM served WHERE "commit" < ?'
        ((before,),) = self._rows(earlier, round, round)
        for client, version in self._rows(
            "SELECT client, round FROM records WHERE round > ? AND round <= ?", before, round
        ):
            self.read(client, version)

    def clients(self, round: int) -> Iterator[int]:
        """Numbers of the clients that had a record after a round, ascending."""
        client = -1
        while found := self._rows(
            "SELECT DISTINCT client FROM records WHERE client > ? AND round <= ? ORDER BY client LIMIT 1000",
            client,
            round,
        ):
            for (client,) in found:
                yield client

    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def commit(self, after: int, round: int, records: Iterable[tuple[int, int, Any]], pins: Iterable[int]) -> None:
        """Write what changed since the last commit; all of it, or nothing.

        Args:
            after: Round of the last commit, -1 = there was none; what stands in the file of later rounds is undone.
            round: Of this commit.
            records: Client, version in (`after`, `round`] and packed record; of one client in the order of versions.
            pins: Earlier rounds that this commit's checkpoint may look at.
        """
        with self._explained(), self._database as database:
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
        """The same records in a file of another folder, which is overwritten."""
        other = RecordDatabase(folder, create=True)
        with self._explained():
            self._database.backup(other._database)
        return other

    def _rows(self, query: str, *values: int) -> list[Any]:
        with self._explained():
            return self._database.execute(query, values).fetchall()

    def _decoded(self, client: int, crc: Any, content: Any) -> Any:
        try:
            if zlib.crc32(content) == crc:
                require_plain(io.BytesIO(content))
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error) if isinstance(error, NotPlain) else type(error).__name__
        else:
            reason = "its checksum is another"
        raise CheckpointMismatch(
            f"{self.path} holds a torn record of client {client} ({reason}); choose an earlier `ckpt_path`."
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What SQLite refuses, as errors of ours."""
        try:
            yield
        except sqlite3.Error as error:
            if "disk is full" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path)) from error
            raise CheckpointMismatch(
                f"{self.path} is torn, or cannot be used ({error}); choose another `ckpt_path`."
            ) from error


def _encoded(packed: Any) -> bytes:
    """As ``torch.save`` writes it, which loads with ``weights_only=True``."""
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    return buffer.getvalue()
