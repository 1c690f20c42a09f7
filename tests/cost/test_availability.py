"""Times at which clients are available."""

from __future__ import annotations

import re

import pytest

from lightning_sparsefl.cost import Availability
from lightning_sparsefl.errors import InvalidOption

DAY = Availability(intervals=[[[2, 5], [8, 10]]], period=10)


@pytest.mark.parametrize(
    ("at", "then"), [(0, 2), (2, 2), (4.5, 4.5), (5, 8), (9, 9), (10, 12), (17, 18), (1e6 + 3, 1e6 + 3)]
)
def test_the_next_time_by_hand(at, then):
    assert DAY.next_time(DAY.intervals[0], at) == then


def test_a_client_is_available_at_the_time_that_it_waits_for():
    """Also where the sum of period and start is rounded."""
    odd = Availability(intervals=[[[0.1, 0.2]]], period=0.7)
    for cycle in range(1000):
        then = odd.next_time(odd.intervals[0], cycle * 0.7 + 0.3)
        assert odd.next_time(odd.intervals[0], then) == then
        assert then == pytest.approx((cycle + 1) * 0.7 + 0.1)


def test_an_interval_may_start_where_the_one_before_ends():
    both = Availability(intervals=[[[0, 4], [4, 6]]], period=10)
    assert [both.next_time(both.intervals[0], at) for at in (3, 4, 6)] == [3, 4, 10]


@pytest.mark.parametrize(
    "intervals",
    [[], [[]], [[[0, 5], []]], [[[5, 2]]], [[[0, 4], [3, 6]]], [[[0, 11]]], [[[-1, 2]]], [[["0", 2]]], [[0, 5]]],
)
def test_intervals_that_do_not_ascend_are_refused(intervals):
    message = rf"`federation.availability.intervals` is {re.escape(repr(intervals))}; expected lists of intervals"
    with pytest.raises(InvalidOption, match=message):
        Availability(intervals=intervals, period=10)


@pytest.mark.parametrize("period", [0, -1, float("nan"), "10"])
def test_periods(period):
    with pytest.raises(InvalidOption, match=r"`federation.availability.period` is .*; expected a number"):
        Availability(intervals=[[[0, 1]]], period=period)
