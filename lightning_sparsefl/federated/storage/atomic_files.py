"""Files that are written whole or not at all, and hold plain types only."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch, DiskFull, SparseFLError
from lightning_sparsefl.federated.storage.safe_load import NotPlain, load_checked

_LEFTOVERS = ".*.tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, content: Any, keep: Path | None = None) -> None:
    """Write with ``torch.save`` so that a crash leaves the old file or the new one, never half of it.

    Args:
        path: File to write; its folder is made if needed.
        content: Plain types and tensors.
        keep: A second name, in the same folder, for the file that is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with _create(temporary) as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _keep(path, keep)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _create(temporary: Path) -> BinaryIO:
    """Open a new file for writing; its name can be guessed, so a link that waits there is removed, not followed."""
    temporary.unlink(missing_ok=True)
    return temporary.open("xb")


def _keep(path: Path, keep: Path) -> None:
    """Give a file a second name; without hard links it moves, and has the second name alone for a moment."""
    link = _temporary(keep)
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
        path: File to write.
        text: Its content, written as UTF-8.
    """
    temporary = _temporary(path)
    try:
        with _create(temporary) as file:
            file.write(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while they wrote."""
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
    """Convert an error that a full disk has caused into :class:`DiskFull`.

    Where a write fails inside ``torch.save``, torch may raise its own ``RuntimeError`` while it handles the error of
    the operating system.

    Args:
        folder: Folder of the run.

    Raises:
        DiskFull: If the disk or the quota is exhausted.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = next((cause for cause in _causes(error) if isinstance(cause, OSError) and cause.errno in _FULL), None)
        if full is None or isinstance(error, SparseFLError):
            raise
        raise DiskFull(
            f"The disk of {folder} is full ({full.strerror}): the run has stopped, and its last committed round is "
            "intact; free some space, and go on with `ckpt_path: last`."
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those during whose handling it was raised, the newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
