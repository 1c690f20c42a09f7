"""Heartbeats between ranks: one that is lost without closing its connections is noticed before a collective times out.

A process that is killed closes its connections, which the next collective of the others reports at once. A machine that
loses its power or its network, and a process that is stopped, do not: the others would wait for `trainer.timeout`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized

from lightning_sparsefl.federated.distributed.launcher import stop_run
from lightning_sparsefl.federated.distributed.ranks import Ranks

SECONDS = 90.0
"""Time without a heartbeat after which a rank is lost, unless `trainer.timeout` is shorter."""
_BEATS = 18
"""Number of intervals in that time."""
_DONE = 1 << 40
"""Number that a rank adds to its beats when it ends."""


@contextmanager
def heartbeats(ranks: Ranks) -> Iterator[None]:
    """Exchange heartbeats with the other ranks within the context; if one is lost, print why and end this process.

    Args:
        ranks: Ranks of the run.
    """
    if ranks.size == 1 or not _distributed_is_initialized():
        yield
        return
    limit = getattr(ranks.fabric.strategy, "_timeout", None)
    seconds = SECONDS if limit is None else min(SECONDS, limit.total_seconds())
    children = getattr(ranks.fabric.strategy.launcher, "procs", ())

    def stop(lost: list[int]) -> None:
        names = ", ".join(map(str, lost))
        stop_run(f"There was no heartbeat from rank {names} for {seconds:g} seconds", children)

    heartbeat = Heartbeat(ranks.store(), ranks.rank, ranks.size, seconds, stop)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.stop()


class Heartbeat:
    """Two threads of a rank: one counts its beats in a store and reads those of the others, one looks for missing ones.

    They are two since a call of the store blocks if the machine of the store is gone. A rank is lost after a number of
    intervals *of this process* without a beat, so that a job whose processes are all suspended can continue.

    Args:
        store: Store of the process group, in which no key of another run starts with ``alive/``.
        rank: This rank.
        size: Number of ranks.
        seconds: Time without a beat after which a rank is lost.
        lost: Function that is called with the lost ranks.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, seconds: float, lost: Callable[[list[int]], object]
    ) -> None:
        self._store, self._rank, self._lost = store, rank, lost
        self._interval = seconds / _BEATS
        self._others = [other for other in range(size) if other != rank]
        self._beats = dict.fromkeys(self._others, 0)
        self._missed = dict.fromkeys(self._others, 0)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]

    def start(self) -> None:
        """Start the threads, which do not keep the process alive."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell the others that this rank ends, and stop the threads."""
        self._stopped.set()
        self._count(self._rank, _DONE)
        for thread in self._threads:  # one in a call of the store would abort an interpreter that shuts down
            thread.join(timeout=self._interval)

    def _beat(self) -> None:
        while not self._stopped.is_set() and self._count(self._rank, 1) is not None:
            for other in self._others:
                beats = self._count(other, 0)
                if beats is None:
                    return
                if beats != self._beats[other]:
                    self._beats[other], self._missed[other] = beats, 0
            self._stopped.wait(self._interval)

    def _count(self, rank: int, more: int) -> int | None:
        """Add to the beats of a rank and return them, or None if the store is gone: then all beats are missing."""
        try:
            return self._store.add(f"alive/{rank}", more)
        except RuntimeError:
            return None

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            for other in self._others:
                self._missed[other] += self._beats[other] < _DONE
            lost = [other for other in self._others if self._missed[other] > _BEATS]
            if lost:
                self._lost(lost)
                return
