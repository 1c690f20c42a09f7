"""What is kept about a client between rounds, by its owner, as plain values.

The server keeps what the client uploaded for it; the node keeps the client's memory. Neither reads the other's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.exchange.plain_values import pack_plain, unpack_plain
from lightning_sparsefl.types import Masks, Shared, Weights


@dataclass(frozen=True)
class ServerRecord:
    """What the server keeps about one client."""

    shared: Shared = field(default_factory=dict)
    """What the client uploaded for the server, or the algorithm observed about it."""
    held: str | None = None
    """Digest of the masks that the client holds; None = it holds none."""
    version: int | None = None
    """Version of the node's record that belongs to this one; None = the node keeps none."""

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {"shared": pack_plain(self.shared, "shared"), "held": self.held, "version": self.version}

    @classmethod
    def from_plain(cls, packed: Mapping[str, Any], client: int, device: torch.device) -> ServerRecord:
        """Restore a record.

        Args:
            packed: Plain values from :meth:`to_plain`.
            client: Number of the client, for the error message.
            device: Device of the tensors.

        Raises:
            CheckpointMismatch: If a checkpoint brought anything else.
        """
        try:
            record = cls(**unpack_plain(packed, device))
            _require_tree(record.shared, "shared")
            _require_masks(record.shared.get("masks", {}), "shared['masks']")
            _require_kind(record.held, str, "held")
            _require_kind(record.version, int, "version")
        except Exception as error:
            raise _as_mismatch(error, client) from error
        return record


@dataclass(frozen=True)
class NodeRecord:
    """What a node keeps of one of its clients."""

    memory: Shared = field(default_factory=dict)
    """What the algorithm's `Update.memory` holds."""
    buffers: Weights = field(default_factory=dict)
    """The client's own floating-point buffers, with `federation.buffers: local`."""
    masks: Masks = field(default_factory=dict)
    """Masks that the client holds, where messages arrive as bytes that are encoded against them."""

    def __bool__(self) -> bool:
        return bool(self.memory or self.buffers or self.masks)

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {name: pack_plain(value, name) for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, packed: Mapping[str, Any], client: int, device: torch.device) -> NodeRecord:
        """Restore a record.

        Args:
            packed: Plain values from :meth:`to_plain`.
            client: Number of the client, for the error message.
            device: Device of the tensors.

        Raises:
            CheckpointMismatch: If a checkpoint brought anything else.
        """
        try:
            record = cls(**unpack_plain(packed, device))
            _require_tree(record.memory, "memory")
            _require_tree(record.buffers, "buffers")
            _require_masks(record.masks, "masks")
        except Exception as error:
            raise _as_mismatch(error, client) from error
        return record


def _as_mismatch(error: Exception, client: int) -> Exception:
    if is_out_of_memory(error):
        return error
    return CheckpointMismatch(
        f"The record of client {client} is damaged, or of another version ({type(error).__name__}: {error}); "
        "choose another `ckpt_path`."
    )


def _require_tree(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` is a {type(value).__name__}, not a mapping")


def _require_masks(masks: Any, name: str) -> None:
    _require_tree(masks, name)
    for key, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"`{name}[{key!r}]` is not a mask")


def _require_kind(value: Any, kind: type, name: str) -> None:
    if value is not None and type(value) is not kind:
        raise TypeError(f"`{name}` is a {type(value).__name__}")
