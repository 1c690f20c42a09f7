"""Start of the processes, and their termination with one error message when one of them fails."""

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
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _set_num_threads_if_needed
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.distributed import DistError
from torch.utils.data import BatchSampler, DataLoader

from lightning_sparsefl.errors import RankFailed, SparseFLError

T = TypeVar("T")

_EXIT = 2
_PATIENCE = 30.0
"""Time that a process has to exit by itself after another one failed, in seconds."""
_UNCONNECTED = 1.0
"""The same before the processes are connected, when it can only wait for the other one."""
_LAUNCHER = "LIGHTNING_SPARSEFL_LAUNCHER"
"""Environment variable with the number of the process that started this one as another rank."""
_CLEANUP_SECONDS = 0.1
"""Time that the threads of a process group need to free their tensors, in seconds."""
_REPLACED = [f"{prefix}{name}" for name in ("__init__", "__setattr__", "__delattr__") for prefix in ("", "__old")]
"""Attributes of data loader classes that Fabric and Lightning replace."""


def launch(fabric: Fabric, work: Callable[[Fabric], T]) -> T:
    """Run a function in all processes of a Fabric and return the result of the first rank.

    Args:
        fabric: Fabric that is not launched yet.
        work: Function that every process calls.

    Raises:
        RankFailed: If a process died, or the processes could not connect.
    """
    launcher, work = fabric.strategy.launcher, partial(_run_to_completion, work)
    try:
        if isinstance(launcher, _MultiProcessingLauncher):
            return _in_children(fabric, work, launcher._start_method)
        with _loaders_restored():
            result: T = fabric.launch(work)
    except DistError as error:
        raise RankFailed(
            f"The processes did not connect within `trainer.timeout` ({str(error).partition(chr(10))[0]}); "
            "raise it, or check why one of them did not start."
        ) from error
    return result


@contextmanager
def _loaders_restored() -> Iterator[None]:
    """Restore the methods of data loader classes that Fabric wraps while it runs.

    Lightning does not restore them after an error, nor if a `Trainer` wrapped them again inside. Each such run leaves
    one layer of wrappers, and after some hundred runs the recursion limit prevents the creation of loaders.
    """
    kinds = _loader_kinds()
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


def _loader_kinds() -> set[type]:
    return {kind for base in (DataLoader, BatchSampler) for kind in {base, *get_all_subclasses(base)}}


@contextmanager
def _loaders_unwrapped() -> Iterator[None]:
    """Restore the methods of data loader classes that Fabric has wrapped, within the context.

    The wrappers note the arguments of each loader, so that Fabric could make it again with another sampler. A
    federation never asks for that, and makes a loader for each client and round; noting takes ten times as long.
    """
    wrapped = [
        (kind, name, vars(kind)[name], vars(kind)[f"__old{name}"])
        for kind in _loader_kinds()
        for name in ("__init__", "__setattr__", "__delattr__")
        if f"__old{name}" in vars(kind)
    ]
    for kind, name, _, own in wrapped:
        setattr(kind, name, own)
    try:
        yield
    finally:
        for kind, name, wrapper, _ in wrapped:
            setattr(kind, name, wrapper)


def _run_to_completion(work: Callable[[Fabric], T], fabric: Fabric) -> T:
    """Run `work`, then wait briefly for the process group's threads to free the tensors of the last collective.

    They need the GIL for this. A thread that requests it while the interpreter shuts down aborts the process, which a
    launcher reports as a failed rank.
    """
    with _loaders_unwrapped():
        result = work(fabric)
    if _distributed_is_initialized():  # not after an error, which must be reported before a launcher ends this process
        time.sleep(_CLEANUP_SECONDS)
    return result


def _in_children(fabric: Fabric, work: Callable[[Fabric], T], method: Any) -> T:
    """Run `work` in forked or spawned children; this process only waits, and raises the error that ended a child."""
    errors: Any = mp.get_context(method).SimpleQueue()
    try:
        result: T = fabric.launch(partial(_send_error, errors, work))
    except mp.ProcessExitedException as error:
        if error.signal_name is None and not errors.empty():
            raise errors.get() from None
        how = error.signal_name or f"the exit code {error.exit_code}"
        raise RankFailed(f"Rank {error.error_index} was ended by {how}{_ALL_ENDED}") from None
    return result


_ALL_ENDED = ", so the run was stopped; resume it from the last committed round with `ckpt_path: last`."


def _send_error(errors: Any, work: Callable[[Fabric], T], fabric: Fabric) -> T:
    """Call `work`, and send a `SparseFLError` to the parent, which gets other errors as text of a traceback."""
    try:
        return work(fabric)
    except SparseFLError as error:
        errors.put(error)
        sys.exit(_EXIT)


class WatchedLauncher(_SubprocessScriptLauncher):
    """Launcher that starts the other ranks as Lightning does, reports one that died, and ends all that remain.

    A rank ends as well when the process that started it has died.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes and call a function in this one.

        Args:
            function: Function to call.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.
        """
        if not isinstance(self.cluster_environment, TorchElasticEnvironment):  # whose machines may differ in size
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        returned = threading.Event()
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())  # which the children inherit
            self._call_children_scripts()
            threading.Thread(target=_watch, args=(self.procs,), daemon=True, name="rank watch").start()
        elif os.environ.get(_LAUNCHER) not in (None, str(os.getpid())):  # its own in a second run of this process
            watched = int(os.environ[_LAUNCHER]), returned
            threading.Thread(target=_watch_launcher, args=watched, daemon=True, name="launcher watch").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except (RankFailed, DistError):
            _end(self.procs, patience=5)
            raise
        finally:
            returned.set()


def _watch(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all children; if one fails and this process does not exit within `_PATIENCE` seconds, end it.

    This process normally notices the failure in its next collective, and then exits in an orderly way. Lightning's own
    watch does not wait for that.
    """
    running = True
    while running:
        running = any(child.poll() is None for child in children)
        failed = [rank for rank, child in enumerate(children, start=1) if child.poll()]
        if failed:
            time.sleep(_PATIENCE if _distributed_is_initialized() else _UNCONNECTED)
            _exit_after_failure(children, failed[0])
        time.sleep(0.5)


def _watch_launcher(launcher: int, returned: threading.Event) -> None:
    """Wait for the process that started this one; if it dies and this one is not done soon after, end this one.

    Args:
        launcher: Number of the process.
        returned: Event of the end of this process's work.
    """
    while os.getppid() == launcher:
        if returned.wait(0.5):
            return
    if not returned.wait(_PATIENCE if _distributed_is_initialized() else 0):
        stop_run("The process that started this rank has died")


def _exit_after_failure(children: Sequence[subprocess.Popen[bytes]], rank: int) -> NoReturn:
    code = children[rank - 1].returncode
    how = f"signal {-code}" if code < 0 else f"the exit code {code}"
    stop_run(f"Rank {rank} was ended by {how}", children)


def stop_run(reason: str, children: Sequence[subprocess.Popen[bytes]] = ()) -> NoReturn:
    """Print why the run stops, and end this process and its children at once; committed rounds are on disk.

    Args:
        reason: Sentence without a full stop.
        children: Processes of other ranks that this one has started.
    """
    print(f"sparsefl: error: {reason}{_ALL_ENDED}", file=sys.stderr, flush=True)
    _end(children, patience=0)
    os._exit(_EXIT)  # the training thread cannot be interrupted otherwise


def _end(children: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Wait up to `patience` seconds for the children to exit, then kill those that remain."""
    until = time.monotonic() + patience
    while time.monotonic() < until and any(child.poll() is None for child in children):
        time.sleep(0.1)
    for child in children:
        if child.poll() is None:
            child.kill()
