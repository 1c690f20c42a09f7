"""The records of a node's clients, as files: one for each run, client and version."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.safe_load import load_plain


class DiskRecords:
    """Versions of the clients' records, which outlive the daemon.

    Versions of the last `history` rounds are kept, since a server that was killed goes on from its last checkpoint.

    Args:
        folder: Folder of the files; created if needed.
        history: Number of rounds that the server may go back.
    """

    def __init__(self, folder: Path, history: int) -> None:
        self.folder, self.history = folder, history
        self._run = folder

    def enter(self, run: str) -> None:
        """Work with the records of a run from now on.

        Args:
            run: Identifier of the run; any text, since only its digest names a folder.
        """
        self._run = self.folder / hashlib.sha256(run.encode()).hexdigest()[:32]

    def get(self, client: int, version: int) -> dict[str, Any] | None:
        """Return a version of a client's record; None if it is not here, or damaged.

        Args:
            client: Number of the client.
            version: Number of finished rounds after which the record was made.
        """
        path = self._path(client, version)
        if not path.is_file():
            return None
        try:
            packed: dict[str, Any] = load_plain(path)
        except CheckpointMismatch as error:
            print(f"sparsefl-node: {error}", flush=True)
            return None
        return packed

    def put(self, client: int, packed: dict[str, Any], version: int, keep: tuple[int, ...]) -> None:
        """Write a version, and delete those that nothing asks for any more, the ones of a lost future included.

        Args:
            client: Number of the client.
            packed: The record as plain values.
            version: Number of finished rounds, the current one included.
            keep: Rounds whose versions may be asked for again.
        """
        write_atomically(self._path(client, version), packed)
        versions = {int(path.stem.removeprefix("round-")): path for path in self._files(client)}
        asked = {*keep, *range(max(version - self.history, 0), version + 1)}
        wanted = {max((v for v in versions if v <= at), default=None) for at in asked}
        for other, path in versions.items():
            if other not in wanted:
                path.unlink()

    def _files(self, client: int) -> list[Path]:
        return list(self._path(client, 0).parent.glob("round-*.pt"))

    def _path(self, client: int, version: int) -> Path:
        return self._run / f"client-{int(client)}" / f"round-{int(version):08d}.pt"
