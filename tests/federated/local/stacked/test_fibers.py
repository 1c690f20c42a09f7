"""Suspended work: who runs when, whose error is whose, and what is left behind."""

import gc
import weakref

import greenlet
import pytest
import torch

from lightning_sparsefl.federated.local.stacked import fibers
from lightning_sparsefl.federated.local.stacked.fibers import run


@pytest.fixture(autouse=True)
def ends():
    """No work is left suspended, and the thread has the grad mode that it had."""
    gc.collect()
    before = _suspended()
    yield
    gc.collect()
    assert _suspended() == before
    assert torch.is_grad_enabled()


def _suspended():
    greenlets = [each for each in gc.get_objects() if issubclass(type(each), greenlet.greenlet)]
    return sum(bool(each) for each in greenlets if each is not greenlet.getcurrent())


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
def test_an_error_of_one_ends_all_works(works):
    with pytest.raises(ValueError, match="mine"):
        list(run(works, lambda requests: requests))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_server_ends_all_works(error):
    ended = []

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


def test_a_caller_that_stops_early_leaves_no_work():
    answers = run([asking(1), asking(2)], lambda requests: requests)
    assert next(answers)[0] == [1]
    answers.close()


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


def test_a_grad_mode_that_a_work_sets_is_its_own():
    def work():
        with torch.no_grad():
            fibers.ask(None)
            return torch.is_grad_enabled()

    def serve(requests):
        assert torch.is_grad_enabled()
        return requests

    assert [value for value, _ in run([work, work, torch.is_grad_enabled], serve)] == [False, False, True]


def test_an_interrupt_within_a_work_is_raised_at_once():
    served = []

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run([asking(1), interrupted, asking(2)], served.append))
    assert not served


def test_a_result_is_not_kept():
    class Result:
        pass

    results = [weakref.ref(value) for value, _ in run([Result], lambda requests: requests)]
    gc.collect()
    assert [result() for result in results] == [None]
