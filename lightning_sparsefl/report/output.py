"""Printing on the terminal, which can be silenced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SILENT: ContextVar[bool] = ContextVar("silent", default=False)
_LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def silenced(silent: bool = True) -> Iterator[None]:
    """Print no tables and notes, and no information of Lightning's loggers; warnings and errors are shown.

    Lightning sets the levels of its loggers when it is imported, so it must be imported before.

    Args:
        silent: Whether to do so; False has no effect.

    Example:
        >>> with silenced():
        ...     print_line("a note")
    """
    if not silent:
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    token = _SILENT.set(True)
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.WARNING))
    try:
        yield
    finally:
        _SILENT.reset(token)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_silent() -> bool:
    """Return whether tables and notes are silenced."""
    return _SILENT.get()


def print_line(text: str) -> None:
    """Print a line at once, unless output is silenced.

    Args:
        text: Line to print.
    """
    if not is_silent():
        print(text, flush=True)
