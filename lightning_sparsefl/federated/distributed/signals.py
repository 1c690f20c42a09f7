"""SIGTERM and Ctrl-C: the client that trains is finished, what can be committed is, and then the process leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ECHO = 1.0
"""Seconds within which a second SIGINT is an echo: a launcher passes on what the terminal has sent to all."""


class Interrupted(BaseException):
    """A signal asks the run to stop. Not an `Exception`, so that nobody takes it for a client's failure.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_exception(number: int, first: bool) -> BaseException:
    """What ends a process after a signal: the exception that Python itself would raise, so the usual exit code.

    Args:
        number: Of the signal.
        first: Whether this is the first rank, whose exit code tells. The others leave with 0: a launcher takes
            any other code for a crash, and would kill the first rank.
    """
    if not first:
        return SystemExit(0)
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class Interrupts:
    """Notes SIGTERM and SIGINT while it is entered; whoever can stop asks :meth:`check`.

    A second Ctrl-C stops at once. Handlers are set in the main thread only, for signals that are not ignored (a shell
    ignores SIGINT for what it runs in the background), and the former ones come back.
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
            raise KeyboardInterrupt  # which a client's Trainer has turned into an exit

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._since = number, now
            # not `print`, which must not be entered twice, as it would be if the signal came within it
            with contextlib.suppress(OSError):
                os.write(2, f"\n{signal.Signals(number).name}: stopping after the client that trains now.\n".encode())
        elif number == signal.SIGINT and now - self._since > _ECHO:
            self._at_once = True
            raise KeyboardInterrupt
