"""A lock that excludes a second process from a folder, and that is released when its process ends.

It is a lock of an open file (``flock``): the operating system releases it however the process ends, and on NFS it
works between machines under Linux. A POSIX record lock (``lockf``) would be lost as soon as the process itself closes
another handle of the file, as when a callback copies the run folder. Forked children, such as a loader's workers,
close the file, since the lock would otherwise last as long as they do.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from pathlib import Path
from typing import IO

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_sparsefl.errors import InvalidOption

LOCK = ".lock"
"""Name of the file in a run folder."""
_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()
"""Locks that this process holds."""


class FolderLock:
    """Lock file of a folder, locked from :meth:`acquire` until :meth:`release`.

    Args:
        folder: Existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Lock the folder; on a file system without locks, only warn.

        Raises:
            InvalidOption: If another process holds the lock.
        """
        if self._file is not None:
            return
        import fcntl  # imported here, since it does not exist on Windows

        file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = file.read(200).strip() or "another process"
                file.close()
                raise InvalidOption(
                    f"{self.path.parent} is in use by {holder}; expected one process per run folder. Wait until that "
                    "process has ended, or set another `ckpt_path` or `trainer.default_root_dir`."
                ) from None
            rank_zero_warn(
                f"{self.path.parent} is on a file system without locks ({error.strerror}); make sure that no other "
                "process trains in it."
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        file.flush()
        self._file = file
        _HELD.add(self)
        weakref.finalize(self, file.close)

    def release(self) -> None:
        """Unlock the folder."""
        if self._file is not None:
            self._file.truncate(0)
            self.close()

    def close(self) -> None:
        """Close the file; the lock is released unless another process has the file open."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _HELD.discard(self)


def _close_in_child() -> None:
    for lock in list(_HELD):
        lock.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)
