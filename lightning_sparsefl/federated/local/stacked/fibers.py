"""Suspended work: several clients' work in one thread, of which one runs at a time.

An algorithm calls ``client.fit(...)`` in the middle of its own code. To fit several clients at once, each client's work
is a greenlet, a stack of calls of its own, which waits in `fit` until all others have arrived there or ended. So the
module, the data and the random generators, which all share, are never used by two at a time. With a thread for each
client, 7 % of a round of ten MLPs went to waking the threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet

Result = TypeVar("Result")
Serve = Callable[[Sequence[Any]], Sequence[Any]]
"""Function that answers the requests of all waiting fibers; an exception as an answer is raised in the fiber."""


class Cancelled(BaseException):
    """Exception that ends a fiber that is no longer needed; no ``except Exception`` catches it."""


class Fiber(Generic[Result]):
    """Suspendable call of a function, which runs only between :meth:`resume` and its next request.

    Args:
        work: Function without arguments; it may call :func:`ask`.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._greenlet = work, _Greenlet(self)
        self._context = copy_context()
        self._greenlet.gr_context = self._context.copy()  # so that the function sees what its caller does
        self._grad = torch.is_grad_enabled()  # of the thread, which the callers and all fibers share
        self.request: Any = None
        self.seconds = 0.0
        """Time in seconds that the function itself has run, without its waiting."""
        self.error: Exception | None = None
        self._value: Result | None = None

    def main(self, answer: Any = None) -> None:
        """Call the function; an error is kept for :meth:`result`."""
        try:
            self._value = self._work()
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return bool(self._greenlet.dead)

    def has_set_context(self) -> bool:
        """Return whether the function, which waits, has set a context variable, which its callers do not see."""
        now, before = self._greenlet.gr_context or {}, self._context
        return len(now) != len(before) or any(before.get(key, now) is not value for key, value in now.items())

    def resume(self, answer: Any = None) -> None:
        """Run the function until its next request or its end.

        Args:
            answer: Answer to its request; an exception is raised there.
        """
        self._run(lambda: self._greenlet.switch(answer))

    def wait(self, request: Any) -> Any:
        """Hand over a request from within the function, and return its answer."""
        self.request = request
        answer = self._greenlet.parent.switch()
        self.request = None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def result(self) -> Result:
        """Return what the function has returned, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def close(self) -> None:
        """End the call, wherever it waits."""
        while not self.done:
            with suppress(Cancelled):
                self._run(lambda: self._greenlet.throw(Cancelled))

    def _run(self, switch: Callable[[], Any]) -> None:
        started, outside = time.perf_counter(), torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad)
        try:
            switch()
        finally:
            self._grad = torch.is_grad_enabled()
            torch.set_grad_enabled(outside)
            self.seconds += time.perf_counter() - started


class _Greenlet(greenlet):
    """Call stack of one fiber."""

    def __init__(self, fiber: Fiber[Any]) -> None:
        super().__init__(fiber.main)
        self.fiber = fiber


def waiting() -> bool:
    """Return whether the caller runs in a fiber, so that it can wait."""
    return isinstance(getcurrent(), _Greenlet)


def ask(request: Any) -> Any:
    """Wait for the answer to a request; possible in a fiber only.

    Args:
        request: Anything that the `serve` of :func:`run` knows.
    """
    current = getcurrent()
    assert isinstance(current, _Greenlet)
    return current.fiber.wait(request)


def run(works: Sequence[Callable[[], Result]], serve: Serve) -> Iterator[tuple[Result, float]]:
    """Run functions that wait for each other's requests, each in a fiber.

    Args:
        works: Functions without arguments.
        serve: Function that answers the requests of all waiting fibers; it is called until no fiber waits.

    Yields:
        What each function has returned, in their order, with the seconds that it ran itself.
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
