"""The time limit of one client's round (`federation.client_timeout`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_sparsefl.errors import ClientFailed


class Deadline:
    """Time limit of a client's round, by elapsed time.

    It is checked between batches and at the end of the client's work, so a single step is never interrupted.

    Args:
        seconds: Time limit in seconds, from the creation of this object.
        fail: Function that creates the error from a reason.
    """

    def __init__(self, seconds: float, fail: Callable[[str], ClientFailed]) -> None:
        self._seconds, self._fail, self._started = seconds, fail, time.monotonic()

    def check(self) -> None:
        """Raise :class:`ClientFailed` if the time limit is exceeded."""
        taken = time.monotonic() - self._started
        if taken > self._seconds:
            raise self._fail(
                f"it took {taken:.1f} seconds and is not done, where `federation.client_timeout` is {self._seconds:g}"
            )
