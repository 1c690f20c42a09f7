"""What is kept per client, on disk: memory holds only what changed since the last commit.

Every rank reads the first one's file, so all nodes must see the run folder.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.records import MemoryStore, read_files

_MOST_BYTES_OF_A_COPY = 2**30


class SqliteStore(MemoryStore):
    """Records of all clients, read when they are asked for.

    Args:
        device: Where unpacked tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._file: RecordDatabase | None = None
        self._committed = -1
        self._new: dict[int, dict[int, dict[str, Any]]] = {}
        """By client, then by round: what changed since the last commit."""
        self._pin: int | None = None
        self._view: int | None = None
        """The round that is looked at; None = now."""

    def put(self, client: int, packed: dict[str, Any], round: int) -> None:
        """As the base; an older version goes with it, unless the snapshot is of it."""
        versions = self._new.get(client, {})
        pinned = max((r for r in versions if self._pin is not None and r <= self._pin), default=None)
        self._new[client] = {**{r: v for r, v in versions.items() if r == pinned}, round: packed}

    def clients(self) -> Iterable[int]:
        """As the base; reads the file as it goes."""
        stored = iter(()) if self._file is None else self._file.clients(self._stored_view)
        return _merged(stored, sorted(client for client in self._new if self._unwritten(client) is not None))

    def _find(self, client: int) -> dict[str, Any] | None:
        found = self._unwritten(client)
        if found is None and self._file is not None:
            found = self._file.read(client, self._stored_view)
        return found

    def _unwritten(self, client: int) -> dict[str, Any] | None:
        versions = self._new.get(client, {})
        seen = [r for r in versions if self._view is None or r <= self._view]
        return versions[max(seen)] if seen else None

    @property
    def _stored_view(self) -> int:
        return self._committed if self._view is None else min(self._view, self._committed)

    def commit(self, folder: Path, round: int) -> Any:
        """As the base; the index is the number of the round."""
        if self._file is None or self._file.path.parent.resolve() != folder.resolve():
            old = self._file
            self._file = RecordDatabase(folder, create=True) if old is None else old.copy_to(folder)
        changed = ((c, r, packed) for c in sorted(self._new) for r, packed in sorted(self._new[c].items()))
        self._file.commit(self._committed, round, changed, () if self._pin is None else (self._pin,))
        self._committed = round
        self._new.clear()
        return round

    def follow(self, folder: Path, round: int) -> None:
        """As the base.

        Raises:
            InvalidOption: If this rank does not see the first one's file.
        """
        if self._committed == round:
            return
        try:
            self._file = RecordDatabase.at(folder, round)  # anew, since it may be another folder's
        except CheckpointMismatch as error:
            raise InvalidOption(
                f"`federation.store: disk` needs a run folder that all ranks see, but one does not see what the first "
                f"wrote in {folder}; set `trainer.default_root_dir` to a shared folder, or `federation.store: ram`."
            ) from error
        self._committed = round
        self._new.clear()

    def discard_left_over(self, folder: Path, index_before: Callable[[], Any]) -> None:
        """Nothing, as :meth:`discard_unreferenced`."""

    def discard_unreferenced(self, folder: Path) -> None:
        """Nothing: what no checkpoint needs goes with the next commit."""

    def snapshot(self, round: int) -> Any:
        """As the base: the number of the round."""
        self._pin = round
        return round

    def take_over(self, snapshot: Any) -> Any:
        """As the base; one of the other kind stays what it is."""
        self._pin = None if isinstance(snapshot, Mapping) else snapshot
        return snapshot

    @contextmanager
    def seen_as(self, snapshot: Any) -> Iterator[None]:
        """As the base."""
        now = self._new, self._file
        if isinstance(snapshot, Mapping):
            self._new, self._file = {client: {0: packed} for client, packed in snapshot.items()}, None
        else:
            self._view = snapshot
        try:
            yield
        finally:
            self._view, (self._new, self._file) = None, now

    def records(self) -> dict[int, dict[str, Any]]:
        """As the base, since a copy must fit into memory.

        Raises:
            InvalidOption: If it would be too large.
        """
        size = 0 if self._file is None else self._file.size()
        if size > _MOST_BYTES_OF_A_COPY:
            raise InvalidOption(
                f"A checkpoint that stands alone would hold {size / 2**30:.1f} GiB of clients' records; expected at "
                "most 1: set `save_weights_only` of `ModelCheckpoint`, or leave it out; `last.ckpt` is enough to go on."
            )
        found = ((client, self._find(client)) for client in self.clients())
        return {client: packed for client, packed in found if packed is not None}

    @property
    def checksums(self) -> dict[int, str]:
        """None of files, since each record in the file has its own."""
        return {}

    def load(
        self,
        index: Any,
        folder: Path,
        records: Mapping[int, dict[str, Any]],
        checksums: Mapping[int, str],
        moved: bool = False,
    ) -> None:
        """As the base; records of the other kind count as changed, so that the next commit writes them.

        Raises:
            CheckpointMismatch: If the file is torn, or a record of its newest commit; older ones are checked as they
                are read.
        """
        if isinstance(index, Mapping):
            versions = {**dict.fromkeys(records, 0), **index}
            packed = {**records, **read_files(index, folder, checksums)}
            self._new = {client: {versions[client]: record} for client, record in packed.items()}
        else:
            file = RecordDatabase.at(folder, index)
            file.require_newest_whole(index)
            self._file, self._committed = file, index


def _merged(first: Iterator[int], second: Iterable[int]) -> Iterator[int]:
    """Two ascending sequences as one, without repeats."""
    last = None
    for client in heapq.merge(first, second):
        if client != last:
            yield client
        last = client
