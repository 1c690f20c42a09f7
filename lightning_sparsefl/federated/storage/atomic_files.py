"""Atomic writing of files, and loading of files that contain only plain types."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.errors import CheckpointMismatch, DiskFull, SparseFLError
from lightning_sparsefl.federated.storage.safe_load import NotPlain, load_checked
from lightning_sparsefl.files import replacing

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, content: Any) -> None:
    """Write with ``torch.save`` so that a crash leaves either the old file or the complete new one.

    Args:
        path: File to write; its folder is created if needed.
        content: Content of plain types and tensors.
    """
    with replacing(path) as file:
        torch.save(content, file)


def write_bytes_atomically(path: Path, data: bytes, keep: Path | None = None) -> None:
    """Write bytes as :func:`write_atomically` writes a content.

    Args:
        path: File to write; its folder is created if needed.
        data: Content of the file.
        keep: New path, in the same folder, for the file that is replaced. Default: it is deleted.
    """
    with replacing(path, keep=keep) as file:
        file.write(data)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text as :func:`write_atomically` writes a content.

    Args:
        path: File to write; its folder is created if needed.
        text: Content of the file, written as UTF-8.
    """
    with replacing(path) as file:
        file.write(text.encode())


def load_plain(path: Path) -> Any:
    """Load a file of plain types and tensors on the CPU, without executing its content or trusting its sizes.

    Args:
        path: File written by :func:`write_atomically`.

    Raises:
        CheckpointMismatch: If the file is missing, not readable or damaged, contains anything but plain types, or
            requests more memory than its own size justifies.
    """
    if not path.is_file():
        raise CheckpointMismatch(f"There is no checkpoint at {path}; expected a file (option `ckpt_path`).")
    try:
        with path.open("rb") as file:
            return load_checked(file)
    except PermissionError as error:
        raise CheckpointMismatch(
            f"{path} cannot be read ({error.strerror}); make it readable, or choose another `ckpt_path`."
        ) from error
    except Exception as error:
        reason = f" ({error})" if isinstance(error, NotPlain) else ""
        raise CheckpointMismatch(
            f"{path} is damaged or not a checkpoint of plain types{reason}; choose another `ckpt_path`."
        ) from error


_OF_A_RUN = (
    "the run has stopped, and its last committed round is intact; free some space, and resume with `ckpt_path: last`"
)


@contextmanager
def raise_disk_full(folder: Path, consequence: str = _OF_A_RUN) -> Iterator[None]:
    """Convert an error caused by a full disk into :class:`DiskFull`.

    If a write fails inside ``torch.save`` or a logger, these may raise an error of their own while handling the one of
    the operating system.

    Args:
        folder: Folder that is written to.
        consequence: Clause of the message about the state and what to do, without a final full stop.

    Raises:
        DiskFull: If the disk or the quota is exhausted.
    """
    try:
        yield
    except Exception as error:
        full = next((cause for cause in _causes(error) if isinstance(cause, OSError) and cause.errno in _FULL), None)
        if full is None or isinstance(error, SparseFLError):
            raise
        raise DiskFull(f"The disk of {folder} is full ({full.strerror}): {consequence}.") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, the newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
