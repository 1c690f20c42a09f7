"""Conversion of the errors of a full disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_sparsefl.errors import DiskFull, SparseFLError

_FULL = (errno.ENOSPC, errno.EDQUOT)
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
