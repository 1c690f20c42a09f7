"""Replacement of files as a whole, so that a crash leaves either the old file or the complete new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LEFTOVERS = ".*.tmp"


@contextmanager
def replacing(path: Path, *, keep: Path | None = None, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces another one when its content is on the disk.

    A library that needs a path writes to the `name` of the file. If the content cannot be written completely, the
    temporary file is deleted and the old file stays.

    Args:
        path: File to replace or create; its folder is created if needed.
        keep: New path, in the same folder, for the file that is replaced. Default: it is deleted.
        mode: Permissions of a new file, before the umask.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "numbers.txt"
        ...     with replacing(path) as file:
        ...         _ = file.write(b"1 2 3")
        ...     path.read_text(encoding="utf-8")
        '1 2 3'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _keep(path, keep)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while writing.

    Args:
        folder: Folder to clean, without its subfolders.
    """
    for path in folder.glob(_LEFTOVERS):
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _create(temporary: Path, mode: int) -> BinaryIO:
    """Open a new file for writing; an existing link under its predictable name is removed, not followed."""
    temporary.unlink(missing_ok=True)
    return open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def _keep(path: Path, keep: Path) -> None:
    """Link a file under a second name; without hard links it is moved, so the first name is missing for a moment."""
    link = _temporary(keep)
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:
        path.replace(keep)
    else:
        link.replace(keep)
        link.unlink(missing_ok=True)  # where `keep` is a link to the same file already, POSIX leaves both names


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder without the permission to list it, and any folder on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
