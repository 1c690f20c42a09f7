"""SIGTERM and Ctrl-C: finish the current client, commit the finished rounds, then exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ECHO = 1.0
"""Time in seconds within which a second SIGINT is a duplicate: a launcher forwards the terminal's signal again."""


class Interrupted(BaseException):
    """Request to stop the run; not an `Exception`, so that it is never handled as the failure of a client.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_exception(number: int, first: bool) -> BaseException:
    """Return the exception that ends a process after a signal: the one Python itself would raise, with its exit code.

    Args:
        number: Number of the signal.
        first: Whether this is the first rank, whose exit code is that of the run. The others exit with 0, since a
            launcher treats any other code as a crash and would kill the first rank.
    """
    if not first:
        return SystemExit(0)
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def terminated_at_once() -> Iterator[None]:
    """Raise :class:`Interrupted` on SIGTERM within the context, where Python would end the process without a word.

    It is for the main thread, in which a handler of the user is left alone.
    """
    at_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not at_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: Any) -> None:
    raise Interrupted(number)


class Interrupts:
    """Context manager that records SIGTERM and SIGINT; code that can stop calls :meth:`check`.

    A second Ctrl-C stops immediately. Handlers are installed in the main thread only, for signals that are not ignored
    (a shell ignores SIGINT for background jobs), and the previous handlers are restored on exit.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._since, self._at_once = 0.0, False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._former = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}
        if self._at_once and kind is not None and issubclass(kind, SystemExit):
            raise KeyboardInterrupt  # a client's Trainer has converted it to SystemExit

    @property
    def number(self) -> int | None:
        """Number of the signal that was received; None without one."""
        return self._number

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal was received."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._since = number, now
            # not `print`, which is not reentrant: the signal may arrive within another call of it
            with contextlib.suppress(OSError):
                os.write(2, f"\n{signal.Signals(number).name}: stopping after the current client.\n".encode())
        elif number == signal.SIGINT and now - self._since > _ECHO:
            self._at_once = True
            raise KeyboardInterrupt
