import itertools
import random

import pytest

from lightning_sparsefl.federated.distributed import load_forecast as forecast
from lightning_sparsefl.federated.distributed.load_forecast import Job, LoadForecast
from lightning_sparsefl.federated.distributed.placement import longest_first


def makespan(plan, loads, seconds_per_flop):
    return max(sum(loads[job] for job in jobs) * pace for jobs, pace in zip(plan, seconds_per_flop, strict=True))


def best_makespan(loads, seconds_per_flop):
    """The definition: every way of giving jobs to ranks."""
    ways = itertools.product(range(len(seconds_per_flop)), repeat=len(loads))
    return min(
        makespan([[j for j in loads if way[j] == r] for r in range(len(seconds_per_flop))], loads, seconds_per_flop)
        for way in ways
    )


@pytest.mark.parametrize("seconds_per_flop", [[1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 3.0], [2.0, 1.0, 1.0]])
def test_longest_first_is_near_the_best_plan(seconds_per_flop):
    rng = random.Random(0)
    for _ in range(20):
        loads = {job: rng.uniform(1, 20) for job in range(6)}
        plan = longest_first(loads, len(seconds_per_flop), seconds_per_flop)
        assert sorted(job for jobs in plan for job in jobs) == list(loads)
        bound = (
            4 / 3 if len(set(seconds_per_flop)) == 1 else 5 / 3
        )  # Graham 1969; Friesen 1987 for ranks of several speeds
        assert makespan(plan, loads, seconds_per_flop) <= bound * best_makespan(loads, seconds_per_flop) + 1e-9


def test_a_client_is_expected_to_cost_what_it_was_charged_last():
    seen = LoadForecast(2)
    assert seen.seconds_per_flop == [1.0, 1.0]
    seen.loads({0: 10.0, 1: 10.0})
    seen.learn([Job(0, 0, 500.0, 1.0), Job(1, 1, 1500.0, 3.0)])
    assert seen.loads({0: 10.0, 1: 10.0, 2: 10.0}) == {0: 500.0, 1: 1500.0, 2: 1000.0}


def test_a_slow_rank_is_given_less_and_the_newest_rounds_count_most():
    seen = LoadForecast(2)
    for seconds in (1.0, 4.0, 4.0, 4.0, 4.0):
        loads = seen.loads(dict.fromkeys(range(10), 1.0))
        plan = longest_first(loads, 2, seen.seconds_per_flop)
        seen.learn(Job(i, r, 100.0, seconds if r else 1.0) for r, jobs in enumerate(plan) for i in jobs)
    assert seen.seconds_per_flop[1] / seen.seconds_per_flop[0] == pytest.approx(4, rel=0.25)  # drawn to the mean
    assert [len(jobs) for jobs in longest_first(loads, 2, seen.seconds_per_flop)] == [8, 2]


def test_rounds_in_which_nobody_was_charged_teach_nothing():
    seen = LoadForecast(2)
    seen.loads({0: 1.0})
    seen.learn([])
    seen.learn([Job(0, 0, 0.0, 1.0)])
    assert (seen.loads({0: 1.0}), seen.seconds_per_flop) == ({0: 1.0}, [1.0, 1.0])
    seen.learn([Job(0, 0, 2.0, 1.0)])
    assert seen.seconds_per_flop == [0.5, 0.5]  # a rank that has done nothing is taken to be like the others


def test_a_rank_that_was_slow_once_is_tried_again():
    seen = LoadForecast(2)
    given = []
    for number in range(12):
        loads = seen.loads(dict.fromkeys(range(4), 1.0))
        plan = longest_first(loads, 2, seen.seconds_per_flop)
        given.append(len(plan[1]))
        slow = 100.0 if number == 0 else 1.0
        seen.learn(Job(i, r, 1.0, slow if r else 1.0) for r, jobs in enumerate(plan) for i in jobs)
    assert (given[0], given[1], given[-1]) == (2, 0, 2)


def test_a_large_fleet_is_not_remembered_whole(monkeypatch):
    monkeypatch.setattr(forecast, "_REMEMBERED", 3)
    seen = LoadForecast(1)
    for client in (0, 1, 2, 0, 3):
        seen.loads({client: 1.0})
        seen.learn([Job(client, 0, 10.0 + client, 1.0)])
    assert list(seen._flops) == [2, 0, 3]
