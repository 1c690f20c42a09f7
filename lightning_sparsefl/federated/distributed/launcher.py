"""Starting the processes, and ending all of them with one sentence when one is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch.multiprocessing as mp
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _set_num_threads_if_needed
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.distributed import DistError
from torch.utils.data import BatchSampler, DataLoader

from lightning_sparsefl.errors import RankFailed, SparseFLError

T = TypeVar("T")

_EXIT = 2
_PATIENCE = 30.0
"""Seconds in which a process may end by itself after another one was lost."""
_MOMENT = 0.1
"""Seconds in which the threads of a process group free what they still hold."""
_REPLACED = [f"{prefix}{name}" for name in ("__init__", "__setattr__", "__delattr__") for prefix in ("", "__old")]
"""Attributes of data loaders' classes that Fabric and Lightning change."""


def launch(fabric: Fabric, work: Callable[[Fabric], T]) -> T:
    """Run work in all processes of a Fabric; returns the first rank's result.

    Args:
        fabric: Not launched yet.
        work: Every process's part.

    Raises:
        RankFailed: If a process died, or the processes could not meet.
    """
    launcher, work = fabric.strategy.launcher, partial(_to_the_end, work)
    try:
        if isinstance(launcher, _MultiProcessingLauncher):
            return _in_children(fabric, work, launcher._start_method)
        with _loaders_restored():
            result: T = fabric.launch(work)
    except DistError as error:
        raise RankFailed(
            f"The processes did not meet within `trainer.timeout` ({str(error).partition(chr(10))[0]}); "
            "raise it, or see why one of them did not start."
        ) from error
    return result


@contextmanager
def _loaders_restored() -> Iterator[None]:
    """While it runs, Fabric puts methods around those of data loaders' classes; leave the classes as they were.

    Lightning does not after an error, nor after a run in which a `Trainer` did the same inside: one layer stays then,
    and after some hundred such runs a process can make no loader any more.
    """
    kinds = {kind for base in (DataLoader, BatchSampler) for kind in {base, *get_all_subclasses(base)}}
    before = {kind: {name: vars(kind)[name] for name in _REPLACED if name in vars(kind)} for kind in kinds}
    try:
        yield
    finally:
        for kind, own in before.items():
            for name in _REPLACED:
                if name in own:
                    setattr(kind, name, own[name])
                elif name in vars(kind):
                    delattr(kind, name)


def _to_the_end(work: Callable[[Fabric], T], fabric: Fabric) -> T:
    """Work, and let the process group's threads free the tensors of the last exchange, for which they need the GIL.

    One that asks for it when the interpreter is ending aborts the process, and what a launcher sees is a failed rank.
    """
    result = work(fabric)
    if _distributed_is_initialized():  # not after an error, which must be told before a launcher ends this process
        time.sleep(_MOMENT)
    return result


def _in_children(fabric: Fabric, work: Callable[[Fabric], T], method: Any) -> T:
    """By fork or spawn this process trains nothing: it waits, and repeats the sentence that a child ended with."""
    said: Any = mp.get_context(method).SimpleQueue()
    try:
        result: T = fabric.launch(partial(_tell, said, work))
    except mp.ProcessExitedException as error:
        if error.signal_name is None and not said.empty():
            raise said.get() from None
        how = error.signal_name or f"the exit code {error.exit_code}"
        raise RankFailed(f"Rank {error.error_index} was ended by {how}, {_ALL_ENDED}") from None
    return result


_ALL_ENDED = "so all were; go on from the last committed round with `ckpt_path: last`."


def _tell(said: Any, work: Callable[[Fabric], T], fabric: Fabric) -> T:
    """Send an error of ours to the parent as it is; others get there as the text of their traceback."""
    try:
        return work(fabric)
    except SparseFLError as error:
        said.put(error)
        sys.exit(_EXIT)


class WatchedLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks as Lightning does, but says what became of one that died, and leaves none behind."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=_watch, args=(self.procs,), daemon=True, name="rank watch").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except (RankFailed, DistError):
            _end(self.procs, patience=5)
            raise


def _watch(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all children are done; if one has failed and this process does not notice, end it too.

    It does when it next speaks with the other ranks, and then ends in order. Lightning's watch does not wait for that.
    """
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children, start=1) if child.poll()]
        if failed:
            time.sleep(_PATIENCE)
            _give_up(children, failed[0])
        time.sleep(0.5)


def _give_up(children: Sequence[subprocess.Popen[bytes]], rank: int) -> NoReturn:
    code = children[rank - 1].returncode
    how = f"signal {-code}" if code < 0 else f"the exit code {code}"
    print(f"sparsefl: error: Rank {rank} was ended by {how}, {_ALL_ENDED}", file=sys.stderr, flush=True)
    _end(children, patience=0)
    os._exit(_EXIT)  # what is committed is on disk; the thread that trains cannot be interrupted otherwise


def _end(children: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Give the children some seconds to end by themselves."""
    until = time.monotonic() + patience
    while time.monotonic() < until and any(child.poll() is None for child in children):
        time.sleep(0.1)
    for child in children:
        if child.poll() is None:
            child.kill()
