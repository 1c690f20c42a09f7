"""The progress of long work outside rounds, and of each phase in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from rich.console import Console

from lightning_sparsefl.report import is_silent

_LINE_SECONDS = 30.0
"""Time between two lines in a log file, so that a phase that takes less has none."""


class PhaseProgress:
    """Progress of one phase after another: a bar in a terminal or notebook, elsewhere a line every half minute.

    Both go to the standard error, so that a table or JSON on the standard output stays whole.

    Args:
        live: Whether to show bars. Default: whether the standard error is a terminal or a notebook.
        shown: Whether to show anything.
    """

    def __init__(self, live: bool | None = None, shown: bool = True) -> None:
        self.shown = shown
        self._live = live
        self._bar: Any = None
        self._name = ""
        self._started = self._printed = 0.0

    def show(self, name: str, done: int, total: int, unit: str = "clients") -> None:
        """Show how much of a phase is done; the first call of a phase starts its clock, and the last one ends it.

        Args:
            name: Name of the phase.
            done: Number of finished parts.
            total: Number of all parts.
            unit: Word for the parts.
        """
        if not self.shown or is_silent():
            return
        if name != self._name:
            self._begin(name, done, total, unit)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            print(self._line(done, total, unit), file=sys.stderr, flush=True)
        if done >= total:
            self.close()

    def close(self) -> None:
        """End the current phase, and remove its bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._name = None, ""

    def _begin(self, name: str, done: int, total: int, unit: str) -> None:
        self.close()
        self._name, self._started = name, time.monotonic()
        self._printed = self._started
        console = Console(stderr=True)
        if console.is_terminal or console.is_jupyter if self._live is None else self._live:
            self._bar = Tqdm(
                desc=name,
                initial=done,
                total=total,
                leave=False,
                dynamic_ncols=True,
                file=sys.stderr,
                bar_format=f"{{desc}} {{n_fmt}}/{{total_fmt}} {unit} |{{bar}}| {{elapsed}}<{{remaining}}",
            )

    def _line(self, done: int, total: int, unit: str) -> str:
        elapsed, clock = time.monotonic() - self._started, Tqdm.format_interval
        left = clock(elapsed / done * (total - done)) if done else "?"
        return f"{self._name}: {done}/{total} {unit}  elapsed {clock(elapsed)}  remaining {left}"
