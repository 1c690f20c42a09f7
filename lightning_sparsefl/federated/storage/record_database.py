"""A shard of a store: a SQLite database of versioned records, in which a commit costs what the changed records cost.

The version of a record is the number of finished rounds at the time it was stored. The database serves the newest
commits and the round chosen by `federation.select`; the next commit deletes, in the same transaction, the versions that
none of them needs. Versions that a crash left for a later round are never read, and the next commit deletes them.

The file has the identifier of its run. Each row has a digest of client, version and content. Each commit has the sum,
over all records that it may read, of a hash of client, version and digest; the checkpoint has this sum, too. A row that
was deleted, renumbered, copied or brought from elsewhere is therefore noticed when a run is resumed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.exchange.plain_values import encoded
from lightning_sparsefl.federated.storage.safe_load import NotPlain, require_plain

_TABLES = {
    "run": "CREATE TABLE run (identifier TEXT)",
    "records": "CREATE TABLE records (client INTEGER, round INTEGER, digest BLOB, content BLOB, "
    "PRIMARY KEY (client, round))",
    "by_round": "CREATE INDEX by_round ON records (round)",
    "digests": "CREATE INDEX digests ON records (client, round, digest)",
    "superseded": "CREATE TABLE superseded (client INTEGER, round INTEGER, until INTEGER, "
    "PRIMARY KEY (client, round)) WITHOUT ROWID",
    "served": 'CREATE TABLE served ("commit" INTEGER, round INTEGER, total TEXT, PRIMARY KEY ("commit", round)) '
    "WITHOUT ROWID",
}
"""`superseded`: versions with the round `until` of the next version. `served`: rounds that each commit may read, with
the sums over their records. The index `digests` contains all that a sum needs, so that no content is read."""
_NEEDED = "EXISTS (SELECT 1 FROM served WHERE served.round >= superseded.round AND served.round < superseded.until)"
_KEPT_COMMITS = 3
"""Number of commits that are served: two with checkpoints on disk, and the one being written."""
_WIDTH = 16
"""Size of a digest in bytes."""
_MODULUS = 1 << (8 * _WIDTH)


class RecordDatabase:
    """Database of the versions of all records of one shard.

    Args:
        folder: Folder of the file.
        name: Name of the shard; the file is called ``<name>.sqlite``.
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

    def require(self, round: int, run: str) -> None:
        """Check that the database has the records of a round.

        Args:
            round: Number of finished rounds.
            run: Identifier of the run.

        Raises:
            CheckpointMismatch: If the database is of another run, or does not have the records of that round.
        """
        if self._rows("SELECT identifier FROM run") != [(run,)]:
            raise CheckpointMismatch(
                f"{self.path} is of another run than the checkpoint; expected the run {run!r}: copy the folder "
                "`clients` together with its checkpoint, or choose another `ckpt_path`."
            )
        self.require_served(round)

    def require_served(self, round: int) -> None:
        """Check that the database has the records of a round; a run that goes on deletes those of earlier rounds.

        Args:
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If the database does not have the records of that round.
        """
        if not self._rows("SELECT 1 FROM served WHERE round = ? LIMIT 1", round):
            raise CheckpointMismatch(
                f"{self.path} does not hold the clients' records of round {round} any more, or not yet; "
                "choose the newest checkpoint beside it (`ckpt_path`)."
            )

    def require_sums(self, expected: Mapping[int, str]) -> None:
        """Check that the database has the records that a checkpoint was written with.

        Args:
            expected: Sums over the records by round, from :meth:`commit`.

        Raises:
            CheckpointMismatch: If a row was deleted, renumbered or replaced.
        """
        for round, total in expected.items():
            listed = self._rows("SELECT DISTINCT total FROM served WHERE round = ?", round)
            if listed != [(total,)] or f"{self._sum(round):032x}" != total:
                raise CheckpointMismatch(
                    f"{self.path} does not hold the records of round {round} that the checkpoint was written with: "
                    "a row was deleted, renumbered or replaced; choose another `ckpt_path`."
                )

    def _sum(self, round: int) -> int:
        """Compute the sum over all clients' records after a round, modulo 2**128."""
        newest = "SELECT client, MAX(round), digest FROM records WHERE round <= ? GROUP BY client"
        with self._convert_errors():
            total: int = sum(_term(*row) for row in self._database.execute(newest, (round,)))
        return total % _MODULUS

    def read(self, client: int, round: int) -> Any:
        """Return the packed record of a client after a round, or None if it had no record.

        Args:
            client: Number of the client.
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If the record is damaged.
        """
        found = self._rows(
            "SELECT round, digest, content FROM records WHERE client = ? AND round <= ? ORDER BY round DESC LIMIT 1",
            client,
            round,
        )
        return _decoded(self.path, client, *found[0]) if found else None

    def versions(self, client: int, round: int) -> dict[int, Any]:
        """Return all stored versions of a client's record up to a round.

        Args:
            client: Number of the client.
            round: Number of finished rounds.

        Raises:
            CheckpointMismatch: If a record is damaged.
        """
        found = self._rows("SELECT round, digest, content FROM records WHERE client = ? AND round <= ?", client, round)
        return {version: _decoded(self.path, client, version, digest, content) for version, digest, content in found}

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

    def commit(
        self, run: str, after: int, round: int, records: Iterable[tuple[int, int, Any]], pins: Iterable[int]
    ) -> dict[int, str]:
        """Write the records that changed since the last commit, in one transaction.

        Args:
            run: Identifier of the run.
            after: Round of the last commit, -1 without one; later rounds in the file are deleted.
            round: Round of this commit.
            records: Triples of client, version (at most `round`) and packed record, by ascending version per client.
            pins: Earlier rounds that this commit's checkpoint may refer to.

        Returns:
            For each round that the checkpoint may refer to, the sum over its records.
        """
        with self._convert_errors(), self._database as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM records WHERE round > ?", (after,))
            database.execute("DELETE FROM superseded WHERE until > ?", (after,))
            database.execute('DELETE FROM served WHERE "commit" > ?', (after,))
            if after < 0:
                database.execute("DELETE FROM run")
                database.execute("INSERT INTO run VALUES (?)", (run,))
            total = self._known_sum(after)
            for client, version, packed in records:
                total += self._insert(database, client, version, encoded(packed))
            served = {view: total % _MODULUS if view == round else self._known_sum(view) for view in {round, *pins}}
            sums = {view: f"{number:032x}" for view, number in sorted(served.items())}
            database.executemany(
                "INSERT OR IGNORE INTO served VALUES (?, ?, ?)",
                [(round, view, total) for view, total in sums.items()],
            )
            newest = f'SELECT DISTINCT "commit" FROM served ORDER BY "commit" DESC LIMIT {_KEPT_COMMITS}'
            database.execute(f'DELETE FROM served WHERE "commit" NOT IN ({newest})')
            unneeded = f"SELECT client, round FROM superseded WHERE NOT {_NEEDED}"
            database.execute(f"DELETE FROM records WHERE (client, round) IN ({unneeded})")
            database.execute(f"DELETE FROM superseded WHERE NOT {_NEEDED}")
        return sums

    def _known_sum(self, round: int) -> int:
        """Return the sum of a round that an earlier commit serves, or compute it."""
        found = self._rows("SELECT total FROM served WHERE round = ? LIMIT 1", round)
        return int(found[0][0], 16) if found else self._sum(round)

    def _insert(self, database: sqlite3.Connection, client: int, version: int, content: bytes) -> int:
        """Insert a record; return by how much the sum changes."""
        newest = "SELECT round, digest FROM records WHERE client = ? ORDER BY round DESC LIMIT 1"
        old = database.execute(newest, (client,)).fetchone()
        if old is not None:
            database.execute("INSERT INTO superseded VALUES (?, ?, ?)", (client, old[0], version))
        digest = row_digest(client, version, content)
        database.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (client, version, digest, content))
        return _term(client, version, digest) - (0 if old is None else _term(client, *old))

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


def row_digest(client: int, version: int, content: bytes) -> bytes:
    """Return the digest of a row, which binds the content to its client and version.

    Args:
        client: Number of the client.
        version: Number of finished rounds after which the record was so.
        content: Encoded record.
    """
    return hashlib.blake2b(f"{client} {version} ".encode() + content, digest_size=_WIDTH).digest()


def _term(client: Any, version: Any, digest: Any) -> int:
    """Return what a row adds to the sum; a manipulated file may have values of any type."""
    row = repr((client, version, digest)).encode()
    return int.from_bytes(hashlib.blake2b(row, digest_size=_WIDTH).digest(), "little")


def _decoded(path: Path, client: int, version: int, digest: Any, content: Any) -> Any:
    """Return the values of a record, or raise :class:`CheckpointMismatch` if it is damaged."""
    try:
        if row_digest(client, version, content) == digest:
            require_plain(io.BytesIO(content))
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error) if isinstance(error, NotPlain) else type(error).__name__
    else:
        reason = "its checksum does not match"
    raise CheckpointMismatch(
        f"{path} holds a damaged record of client {client} ({reason}); choose an earlier `ckpt_path`."
    )
