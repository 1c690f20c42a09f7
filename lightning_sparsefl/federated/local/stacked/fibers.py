"""Suspended work: several clients' work in one process, of which one runs at a time.

An algorithm calls ``client.fit(...)`` in the middle of its own code. To fit several clients at once, each client's work
runs in a thread of its own, which waits in `fit` until all others have arrived there or ended. A baton goes from thread
to thread, so that the module, the data and the random generators, which all share, are never used by two at a time.
The threads are those of a pool, since a new one costs more than the Python of a small client's round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
Serve = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers the requests of all who wait; an exception in the place of an answer is raised where it was asked for."""


class Cancelled(BaseException):
    """Ends a work that is not wanted any more; no ``except Exception`` catches it."""


class Fiber(Generic[Result]):
    """One work, in a thread that runs only between :meth:`resume` and its next request.

    Args:
        work: Function without arguments; it may call :func:`ask`.
        threads: Pool with a thread that is free.
    """

    def __init__(self, work: Callable[[], Result], threads: Executor) -> None:
        self._work = work
        self._go: SimpleQueue[Any] = SimpleQueue()  # the baton; a semaphore is written in Python
        self._back: SimpleQueue[None] = SimpleQueue()
        self._grad = torch.is_grad_enabled()  # a thread's own
        self.request: Any = None
        self.done = False
        self.seconds = 0.0
        """Time that the work itself has run, without its waiting."""
        self.error: BaseException | None = None
        self._value: Result | None = None
        threads.submit(self._main)

    def _main(self) -> None:
        first = self._go.get()
        _local.fiber = self
        try:
            if isinstance(first, Cancelled):
                raise first
            with torch.set_grad_enabled(self._grad):
                self._value = self._work()
        except BaseException as error:
            self.error = error
        _local.fiber = None  # the thread outlives the work
        self.done = True
        self._back.put(None)

    def resume(self, answer: Any = None) -> None:
        """Let the work run until its next request or its end.

        Args:
            answer: Answer to its request; an exception is raised there.
        """
        started = time.perf_counter()
        self._go.put(answer)
        self._back.get()
        self.seconds += time.perf_counter() - started

    def wait(self, request: Any) -> Any:
        """Hand over a request from within the work, and return its answer."""
        self.request = request
        self._back.put(None)
        answer = self._go.get()
        self.request = None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def result(self) -> Result:
        """Return what the work has returned, or raise what it has raised."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def close(self) -> None:
        """End the work, wherever it waits."""
        while not self.done:
            self.resume(Cancelled())


class _Local(threading.local):
    fiber: Fiber[Any] | None = None


_local = _Local()


def waiting() -> bool:
    """Return whether the caller is within a work that can wait."""
    return _local.fiber is not None


def ask(request: Any) -> Any:
    """Wait for the answer to a request, within a work only.

    Args:
        request: Anything that the `serve` of :func:`run` knows.
    """
    assert _local.fiber is not None
    return _local.fiber.wait(request)


def run(works: Sequence[Callable[[], Result]], serve: Serve, threads: Executor) -> Iterator[tuple[Result, float]]:
    """Run works that wait for each other's requests.

    Args:
        works: Functions without arguments.
        serve: Answers the requests of all works that wait, again and again until none does.
        threads: Pool with a thread for each work.

    Yields:
        What each work has returned, in their order, with the seconds that it ran itself.
    """
    fibers: list[Fiber[Result]] = []
    try:
        for work in works:
            fibers.append(Fiber(work, threads))
            fibers[-1].resume()
        while waits := [fiber for fiber in fibers if not fiber.done]:
            answers = serve([fiber.request for fiber in waits])
            for fiber, answer in zip(waits, answers, strict=True):
                fiber.resume(answer)
        for fiber in fibers:
            yield fiber.result(), fiber.seconds
    finally:
        for fiber in fibers:
            fiber.close()
