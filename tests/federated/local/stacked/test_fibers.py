"""Suspended work: who runs when, whose error is whose, and what is left behind."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_sparsefl.federated.local.stacked import fibers


def run(works, serve):
    """Run works in a pool of its own, whose end waits for a work that was left suspended."""
    with ThreadPoolExecutor(8) as threads:
        yield from fibers.run(works, serve, threads)


def asking(*requests):
    return lambda: [fibers.ask(request) for request in requests]


def test_those_who_wait_are_answered_together():
    served = []

    def serve(requests):
        served.append(list(requests))
        return [request * 10 for request in requests]

    works = [asking(1, 2), asking(3), lambda: "no request"]
    assert [value for value, _ in run(works, serve)] == [[10, 20], [30], "no request"]
    assert served == [[1, 3], [2]]


def test_only_one_runs_at_a_time():
    running, most = [0], [0]

    def work():
        for _ in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            torch.rand(100).sum()
            running[0] -= 1
            fibers.ask(None)

    list(run([work] * 5, lambda requests: requests))
    assert most == [1]


def test_an_answer_may_be_an_error():
    def work():
        try:
            fibers.ask("x")
        except KeyError:
            return "caught"

    assert [value for value, _ in run([work], lambda _: [KeyError()])] == ["caught"]


def fails():
    raise ValueError("mine")


@pytest.mark.parametrize("works", [[asking(1), fails], [fails, asking(1)]])
def test_an_error_of_one_ends_all_threads(works):
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="mine"):
        list(run(works, lambda requests: requests))
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_server_ends_all_threads(error):
    before, ended = set(threading.enumerate()), []

    def work():
        try:
            fibers.ask(1)
        except Exception:  # as around a client's work
            ended.append("swallowed")
        finally:
            ended.append("ended")

    def serve(requests):
        raise error

    with pytest.raises(error):
        list(run([work, work], serve))
    assert ended == ["ended", "ended"]
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_a_caller_that_stops_early_leaves_no_thread():
    before = set(threading.enumerate())
    answers = run([asking(1), asking(2)], lambda requests: requests)
    assert next(answers)[0] == [1]
    answers.close()
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_a_work_keeps_the_callers_grad_mode():
    with torch.no_grad():
        assert [value for value, _ in run([torch.is_grad_enabled], lambda requests: requests)] == [False]
    assert [value for value, _ in run([torch.is_grad_enabled], lambda requests: requests)] == [True]


def test_waiting_is_not_the_works_own_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(fibers.time, "perf_counter", lambda: clock[0])

    def work():
        clock[0] += 1
        fibers.ask(None)
        clock[0] += 2

    def serve(requests):
        clock[0] += 100
        return requests

    assert [seconds for _, seconds in run([work, work], serve)] == [3, 3]


def test_outside_of_a_work_nobody_waits():
    assert not fibers.waiting()


def test_threads_are_used_again():
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            list(fibers.run([asking(1), asking(2)], lambda requests: requests, threads))
            threads.submit(nothing).result()
        assert len(threads._threads) <= 4


def test_a_thread_that_is_used_again_starts_anew():
    def leaves_grad_mode():
        torch.set_grad_enabled(False)
        fibers.ask(None)

    with ThreadPoolExecutor(1) as threads:
        list(fibers.run([leaves_grad_mode], lambda requests: requests, threads))
        assert [value for value, _ in fibers.run([torch.is_grad_enabled], lambda requests: requests, threads)] == [True]


def test_a_free_thread_holds_no_result():
    class Result:
        pass

    with ThreadPoolExecutor(1) as threads:
        results = [weakref.ref(value) for value, _ in fibers.run([Result], lambda requests: requests, threads)]
        threads.submit(nothing).result()
        gc.collect()
        assert [result() for result in results] == [None]


def nothing():
    return None
