"""What is kept per client between rounds: `shared` by the server, `memory` by the client itself.

Every rank holds all records, masks packed to one bit a weight, so that any rank can train any client. On disk a
round's changed records make one file, and the checkpoint's index says which file holds a client's newest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.files import fingerprint, load_plain, write_atomically
from lightning_sparsefl.sparse.masks import pack, unpack
from lightning_sparsefl.types import Shared

_MASK = "packed_mask"


@dataclass(frozen=True)
class Record:
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


def pack_record(record: Record) -> dict[str, Any]:
    """A record as plain types."""
    return {
        "shared": pack_plain(record.shared),
        "memory": pack_plain(record.memory),
        "buffers": pack_plain(record.buffers),
        "held": record.held,
    }


class ClientStore:
    """Records of all clients.

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

    def get(self, client: int) -> Record:
        """The record of a client; empty if it never took part."""
        packed = self._packed.get(client)
        return Record() if packed is None else Record(**unpack_plain(packed, self.device))

    def packed_masks(self, client: int) -> dict[str, Tensor]:
        """The masks that a client uploaded last, at one bit a weight; empty if it uploaded none."""
        shared = self._packed.get(client, {}).get("shared", {})
        return {name: mask[_MASK] for name, mask in shared.get("masks", {}).items()}

    def put(self, client: int, packed: dict[str, Any]) -> None:
        """Replace a client's record by one that :func:`pack_record` made."""
        self._packed[client] = packed
        self._changed.add(client)

    def __contains__(self, client: int) -> bool:
        return client in self._packed

    def commit(self, folder: Path, round: int) -> dict[int, int]:
        """Write the records that changed since the last commit.

        Args:
            folder: Of the record files.
            round: Names the file.

        Returns:
            The index: client to the round whose file holds its record.
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

    def discard_unreferenced(self, folder: Path) -> None:
        """Delete record files that neither the committed index names nor the one before it."""
        needed = {_file(folder, round_).name for round_ in {*self._index.values(), *self._before}}
        for path in folder.glob("round-*.pt"):
            if path.name not in needed:
                path.unlink()

    def replace(self, records: Mapping[int, dict[str, Any]]) -> None:
        """Look at other records for a while; what is to be committed stays as it is."""
        self._packed = dict(records)

    def records(self) -> dict[int, dict[str, Any]]:
        """All packed records, for a checkpoint that stands alone."""
        return dict(self._packed)

    def load(
        self,
        index: Mapping[int, int],
        folder: Path,
        records: Mapping[int, dict[str, Any]],
        checksums: Mapping[int, str],
        moved: bool = False,
    ) -> None:
        """Take over a checkpoint's records; all of them, or none.

        Args:
            index: Client to round, as :meth:`commit` returned it.
            folder: Of the record files.
            records: Records that the checkpoint holds itself.
            checksums: Of the files.
            moved: Whether what follows is committed elsewhere, so that all records must be written there.

        Raises:
            CheckpointMismatch: If a record file is missing, damaged, or another run's.
        """
        packed = dict(records)
        for round_ in sorted(set(index.values())):
            content = load_plain(_file(folder, round_))
            if fingerprint(content) != checksums.get(round_):
                raise CheckpointMismatch(
                    f"{_file(folder, round_)} is damaged or of another run: it is not what the checkpoint was written "
                    "with; choose another `ckpt_path`."
                )
            packed.update({client: content[client] for client, r in index.items() if r == round_})
        self._packed, self._changed = packed, set(packed if moved else records)
        self._index, self._checksums = ({}, {}) if moved else (dict(index), dict(checksums))


def _file(folder: Path, round_: int) -> Path:
    return folder / f"round-{round_:06d}.pt"
