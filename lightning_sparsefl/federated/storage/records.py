"""What is kept per client between rounds: `shared` by the server, `memory` by the client itself.

Here every rank holds all records, masks packed to one bit a weight, so that any rank can train any client. On disk a
round's changed records make one file, and the checkpoint's index says which file holds a client's newest one.
:class:`~lightning_sparsefl.federated.storage.sqlite_store.SqliteStore` keeps the records on disk alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.exchange.failures import out_of_memory
from lightning_sparsefl.federated.storage.atomic_files import fingerprint, load_plain, write_atomically
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.types import Shared

_MASK = "packed_mask"


@dataclass(frozen=True)
class ClientRecord:
    """What is kept about one client."""

    shared: Shared = field(default_factory=dict)
    """What the server keeps."""
    memory: Shared = field(default_factory=dict)
    """What the client keeps."""
    buffers: Shared = field(default_factory=dict)
    """The client's own floating-point buffers, with `federation.buffers: local`."""
    held: str | None = None
    """Digest of the masks that the client holds, as the server knows."""


def pack_plain(value: Any) -> Any:
    """Nested values as plain types on the CPU, bool tensors at one bit an element.

    Args:
        value: Numbers, strings, None, tensors, and mappings and sequences of these.

    Raises:
        TypeError: If anything else is found.
    """
    if isinstance(value, Tensor):
        if value.dtype == torch.bool:
            return {_MASK: pack(value.cpu()), "shape": list(value.shape)}
        return value.detach().cpu().contiguous()  # an expanded one would be refused when it is read
    if isinstance(value, Mapping):
        return {pack_plain(key): pack_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a `numpy.float64` is a float, too, and could not be read again
    raise TypeError(
        f"`shared`, `memory` and `extra` hold a {type(value).__name__}; expected numbers, strings, None, tensors, and "
        "dicts and lists of these, since they are written into the checkpoint."
    )


def unpack_plain(value: Any, device: torch.device) -> Any:
    """Undo :func:`pack_plain`; tensors go to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        if _MASK in value:
            return unpack(value[_MASK], tuple(value["shape"])).to(device)
        return {key: unpack_plain(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack_plain(item, device) for item in value]
    return value


def pack_record(record: ClientRecord) -> dict[str, Any]:
    """A record as plain types."""
    return {
        "shared": pack_plain(record.shared),
        "memory": pack_plain(record.memory),
        "buffers": pack_plain(record.buffers),
        "held": record.held,
    }


def unpack_record(packed: Mapping[str, Any], device: torch.device) -> ClientRecord:
    """Undo :func:`pack_record`.

    Raises:
        TypeError: If what a checkpoint brought is no record, as other errors do.
    """
    record = ClientRecord(**unpack_plain(packed, device))
    masks = record.shared.get("masks", {})
    if not all(isinstance(tree, Mapping) for tree in (record.memory, record.buffers, masks)):
        raise TypeError("its trees are none")
    if not all(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in masks.values()):
        raise TypeError("its masks are none")
    return record


class MemoryStore:
    """Records of all clients, in memory.

    Args:
        device: Where unpacked tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._packed: dict[int, dict[str, Any]] = {}
        self._changed: set[int] = set()
        self._index: dict[int, int] = {}
        self._checksums: dict[int, str] = {}
        self._before: set[int] = set()
        self._folder: Path | None = None

    def get(self, client: int) -> ClientRecord:
        """The record of a client; empty if it never took part.

        Raises:
            CheckpointMismatch: If a checkpoint brought one that is none.
        """
        packed = self._find(client)
        if packed is None:
            return ClientRecord()
        try:
            return unpack_record(packed, self.device)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise CheckpointMismatch(
                f"The record of client {client} is damaged, or of another version ({type(error).__name__}: {error}); "
                "choose another `ckpt_path`."
            ) from error

    def packed_masks(self, most: int) -> dict[int, dict[str, Tensor]]:
        """The masks that clients uploaded last, at one bit a weight.

        Args:
            most: How many clients, of those with a record the first ones, are looked at.

        Returns:
            By client; none of a client that uploaded none.
        """
        found = {}
        for client in islice(self.clients(), most):
            masks = (self._find(client) or {}).get("shared", {}).get("masks", {})
            found[client] = {name: mask[_MASK] for name, mask in masks.items()}
        return {client: masks for client, masks in found.items() if masks}

    def put(self, client: int, packed: dict[str, Any], round: int) -> None:
        """Replace a client's record.

        Args:
            client: Its number.
            packed: As :func:`pack_record` made it.
            round: Number of finished rounds, the one of this record among them.
        """
        self._packed[client] = packed
        self._changed.add(client)

    def clients(self) -> Iterable[int]:
        """Numbers of the clients that have a record, ascending."""
        return sorted(self._packed)

    def __contains__(self, client: int) -> bool:
        return self._find(client) is not None

    def _find(self, client: int) -> dict[str, Any] | None:
        return self._packed.get(client)

    def commit(self, folder: Path, round: int) -> Any:
        """Write the records that changed since the last commit; only on the first rank.

        Args:
            folder: Of the record files.
            round: Names the file.

        Returns:
            The index, for the checkpoint: client to the round whose file holds its record.
        """
        self._before = set(self._index.values())
        if self._changed:
            content = {client: self._packed[client] for client in sorted(self._changed)}
            write_atomically(_file(folder, round), content)
            self._index.update(dict.fromkeys(sorted(self._changed), round))
            self._checksums[round] = fingerprint(content)
            self._changed.clear()
        return dict(self._index)

    @property
    def checksums(self) -> dict[int, str]:
        """Of the files that the index names, by round."""
        return {round_: self._checksums[round_] for round_ in sorted(set(self._index.values()))}

    def follow(self, folder: Path, round: int) -> None:
        """Take notice, on the other ranks, of what the first one committed."""

    def discard_left_over(self, folder: Path, index_before: Callable[[], Any]) -> None:
        """Delete what a run left that was killed after a commit, and before :meth:`discard_unreferenced`.

        Args:
            folder: Of the record files.
            index_before: Reads the index of the checkpoint before; it returns None where that is no good.
        """
        before = index_before()
        if before is not None:
            self._before = set(before.values()) if isinstance(before, Mapping) else set()
            self.discard_unreferenced(folder)

    def discard_unreferenced(self, folder: Path) -> None:
        """Delete record files that neither the committed index names nor the one before it."""
        needed = {_file(folder, round_).name for round_ in {*self._index.values(), *self._before}}
        for path in folder.glob("round-*.pt"):
            if path.name not in needed:
                path.unlink()

    def snapshot(self, round: int) -> Any:
        """What is kept now, for :meth:`seen_as`; plain, so that a checkpoint can hold it. Only the newest stays good.

        Args:
            round: Number of finished rounds.
        """
        return self.records()

    def take_over(self, snapshot: Any) -> Any:
        """A checkpoint's snapshot as one of this store, which has loaded the checkpoint's index."""
        return dict(snapshot) if isinstance(snapshot, Mapping) else _read_all(self._folder, snapshot)

    @contextmanager
    def seen_as(self, snapshot: Any) -> Iterator[None]:
        """Look at other records for a while; what is to be committed stays as it is."""
        now, self._packed = self._packed, dict(snapshot)
        try:
            yield
        finally:
            self._packed = now

    def records(self) -> dict[int, dict[str, Any]]:
        """All packed records, for a checkpoint that stands alone."""
        return dict(self._packed)

    def load(
        self,
        index: Any,
        folder: Path,
        records: Mapping[int, dict[str, Any]],
        checksums: Mapping[int, str],
        moved: bool = False,
    ) -> None:
        """Take over a checkpoint's records, also those of a store of the other kind; all of them, or none.

        Args:
            index: As :meth:`commit` returned it.
            folder: Of the record files.
            records: Records that the checkpoint holds itself.
            checksums: Of the files.
            moved: Whether what follows is committed elsewhere, so that all records must be written there.

        Raises:
            CheckpointMismatch: If a record file is missing, damaged, or another run's.
        """
        files = isinstance(index, Mapping)
        packed = {**records, **(read_files(index, folder, checksums) if files else _read_all(folder, index))}
        self._packed, self._changed, self._folder = packed, set(records if files and not moved else packed), folder
        self._index, self._checksums = (dict(index), dict(checksums)) if files and not moved else ({}, {})


def read_files(index: Mapping[int, int], folder: Path, checksums: Mapping[int, str]) -> dict[int, dict[str, Any]]:
    """The records that an index names.

    Args:
        index: Client to round.
        folder: Of the record files.
        checksums: Of the files.

    Raises:
        CheckpointMismatch: If a record file is missing, damaged, or another run's.
    """
    records, clients = {}, defaultdict[int, list[int]](list)
    for client, round_ in index.items():
        clients[round_].append(client)
    for round_ in sorted(clients):
        content = load_plain(_file(folder, round_))
        if fingerprint(content) != checksums.get(round_):
            raise CheckpointMismatch(
                f"{_file(folder, round_)} is damaged or of another run: it is not what the checkpoint was written "
                "with; choose another `ckpt_path`."
            )
        records.update({client: content[client] for client in clients[round_]})
    return records


def _read_all(folder: Path | None, round_: int) -> dict[int, dict[str, Any]]:
    """What a store on disk kept after a round."""
    assert folder is not None
    with closing(RecordDatabase.at(folder, round_)) as file:
        return {client: file.read(client, round_) for client in file.clients(round_)}


def _file(folder: Path, round_: int) -> Path:
    return folder / f"round-{round_:06d}.pt"
