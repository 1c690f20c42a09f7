"""Return of a callback's state from a process that Lightning has spawned to the process that launched it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_sparsefl.files import replacing


class ReturnedState:
    """A file by which a spawned process hands a state back to the object that it was copied from.

    Lightning's ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` train copies of the callbacks in other processes, and
    bring back the weights of the module only. Both copies of this object know the same path, which other users cannot
    guess; the file is readable by its owner only and is deleted when it has been read.

    Example:
        >>> state = ReturnedState()
        >>> state.send({"step": 3})
        >>> state.receive(), state.receive()
        ({'step': 3}, None)
    """

    def __init__(self) -> None:
        self.path = os.path.join(tempfile.gettempdir(), f"sparsefl-{secrets.token_hex(16)}.pt")
        weakref.finalize(self, _discard, self.path, os.getpid())

    def send(self, state: dict[str, Any]) -> None:
        """Write a state for the process that launched this one."""
        with replacing(Path(self.path), mode=0o600) as file:
            torch.save(state, file)

    def receive(self) -> dict[str, Any] | None:
        """Return the state that a spawned process has written, once; None if there is no new one."""
        if not os.path.exists(self.path):
            return None
        state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        os.remove(self.path)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        """Share the path with a process that is being spawned; any other copy gets its own."""
        if get_spawning_popen() is None:
            return ReturnedState, ()
        return _at, (self.path,)


def is_spawned(trainer: Any) -> bool:
    """Return whether this process was spawned by a trainer, and is the one whose results it takes."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher) and trainer.local_rank == 0


def _at(path: str) -> ReturnedState:
    state = ReturnedState.__new__(ReturnedState)
    state.path = path
    return state


def _discard(path: str, process: int) -> None:
    if os.getpid() == process:  # a forked copy that ends must leave the file
        with contextlib.suppress(OSError):
            os.unlink(path)
