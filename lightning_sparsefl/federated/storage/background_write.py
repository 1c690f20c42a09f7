"""A write in the background, so that a round does not wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Write = Callable[[], None]
"""Function that writes."""


class BackgroundWrite:
    """At most one write at a time, in a thread.

    Example:
        >>> write, written = BackgroundWrite(), []
        >>> write.start(lambda: lambda: written.append("a"))
        >>> write.finish()
        >>> written
        ['a']
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def start(self, prepare: Callable[[], Write]) -> None:
        """Prepare a write at once, and begin it; the write before must be finished.

        Args:
            prepare: Function that copies what is written; its errors are those of the write.
        """
        assert self._running is None, "the write before is finished"
        try:
            self._running = self._thread.submit(prepare())
        except Exception as error:
            self._running = Future()
            self._running.set_exception(error)

    def finish(self) -> None:
        """Wait for the write, if there is one, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
