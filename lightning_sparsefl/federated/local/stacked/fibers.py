"""Suspended work: several clients' work in one process, of which one runs at a time.

An algorithm calls ``client.fit(...)`` in the middle of its own code. To fit several clients at once, each client's work
runs in a thread of its own, which waits in `fit` until all others have arrived there or ended. A baton goes from thread
to thread, so that the module, the data and the random generators, which all share, are never used by two at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
Serve = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers the requests of all who wait; an exception in the place of an answer is raised where it was asked for."""


class Cancelled(BaseException):
    """Ends the thread of a work that is not wanted any more; no ``except Exception`` catches it."""


class Fiber(Generic[Result]):
    """One work, in a thread that runs only between :meth:`resume` and its next request.

    Args:
        work: Function without arguments; it may call :func:`ask`.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._grad = torch.is_grad_enabled()  # a thread's own
        self._answer: Any = None
        self.request: Any = None
        self.done = False
        self.seconds = 0.0
        """Time that the work itself has run, without its waiting."""
        self.error: BaseException | None = None
        self._value: Result | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        _local.fiber = self
        try:
            if isinstance(self._answer, Cancelled):
                raise self._answer
            with torch.set_grad_enabled(self._grad):
                self._value = self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    def resume(self, answer: Any = None) -> None:
        """Let the work run until its next request or its end.

        Args:
            answer: Answer to its request; an exception is raised there.
        """
        started = time.perf_counter()
        self._answer = answer
        self._go.release()
        self._back.acquire()
        self.seconds += time.perf_counter() - started

    def wait(self, request: Any) -> Any:
        """Hand over a request from within the work, and return its answer."""
        self.request = request
        self._back.release()
        self._go.acquire()
        self.request, answer, self._answer = None, self._answer, None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def result(self) -> Result:
        """Return what the work has returned, or raise what it has raised."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def close(self) -> None:
        """End the work, wherever it waits, and its thread."""
        while not self.done:
            self.resume(Cancelled())
        self._thread.join()


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


def run(works: Sequence[Callable[[], Result]], serve: Serve) -> Iterator[tuple[Result, float]]:
    """Run works that wait for each other's requests.

    Args:
        works: Functions without arguments.
        serve: Answers the requests of all works that wait, again and again until none does.

    Yields:
        What each work has returned, in their order, with the seconds that it ran itself.
    """
    fibers: list[Fiber[Result]] = []
    try:
        for work in works:
            fibers.append(Fiber(work))
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
