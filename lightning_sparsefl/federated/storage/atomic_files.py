"""Files that are written whole or not at all, and hold plain types only."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch, DiskFull
from lightning_sparsefl.federated.storage.safe_load import NotPlain, load_checked

_LEFTOVERS = ".*.tmp"


def write_atomically(path: Path, content: Any, keep: Path | None = None) -> None:
    """Write with ``torch.save`` so that a crash leaves the old file or the new one, never half of it.

    Args:
        path: The file; its folder is made if needed.
        content: Plain types and tensors.
        keep: A second name, in the same folder, for the file that is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _keep(path, keep)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _keep(path: Path, keep: Path) -> None:
    """Give a file a second name; without hard links it moves, and has the second name alone for a moment."""
    link = keep.with_name(f".{keep.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:
        path.replace(keep)
    else:
        link.replace(keep)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text so that a crash leaves the old file or the new one.

    Args:
        path: The file.
        text: Its content, in UTF-8.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a process left that was killed while it wrote."""
    for path in folder.glob(_LEFTOVERS):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_plain(path: Path) -> Any:
    """Load a file of plain types and tensors on the CPU; nothing in it is executed, and no size in it is trusted.

    Args:
        path: File that :func:`write_atomically` wrote.

    Raises:
        CheckpointMismatch: If it is missing, damaged, holds anything but plain types, or asks for more memory than its
            own size justifies.
    """
    if not path.is_file():
        raise CheckpointMismatch(f"There is no checkpoint at {path}; expected a file (option `ckpt_path`).")
    try:
        with path.open("rb") as file:
            return load_checked(file)
    except Exception as error:
        reason = str(error) if isinstance(error, NotPlain) else type(error).__name__
        raise CheckpointMismatch(
            f"{path} is damaged or not a checkpoint of plain types ({reason}); choose another `ckpt_path`."
        ) from error


def fingerprint(content: Any) -> str:
    """SHA-256 of nested plain values and tensors, of what they say and not of how a file holds them.

    Args:
        content: Numbers, strings, None, tensors, and mappings and sequences of these; the order of keys is no matter.

    Example:
        >>> fingerprint({"a": 1, "b": [2.0]}) == fingerprint({"b": (2.0,), "a": 1})
        True
        >>> fingerprint({"a": 1}) == fingerprint({"a": 1.0})
        False
    """
    digest = hashlib.sha256()
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def pieces(value: Any) -> Iterator[Any]:
    """What is hashed: of each value its kind, its length and its bytes, so that no two contents share them."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {list(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)} ".encode()
        for key in sorted(value, key=lambda key: (type(key).__name__, key)):
            yield from pieces(key)
            yield from pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)} ".encode()
        for item in value:
            yield from pieces(item)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield f"text {len(text)} ".encode() + text
    elif isinstance(value, float):
        yield b"float " + struct.pack("<d", value)
    else:
        yield f"{type(value).__name__} {value} ".encode()


@contextmanager
def raise_disk_full(folder: Path) -> Iterator[None]:
    """Say what a full disk means for a run, wherever it was met.

    Args:
        folder: Of the run.

    Raises:
        DiskFull: Instead of the operating system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"The disk of {folder} is full ({error.strerror}): the run has stopped, and its last committed round is "
            "intact; free some space, and go on with `ckpt_path: last`."
        ) from error
