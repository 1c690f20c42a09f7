from __future__ import annotations

import math

import pytest

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse import schedule


def test_the_shapes():
    assert [schedule.constant(0.3, step, 5) for step in (0, 4, 9)] == [0.3, 0.3, 0.3]
    assert [schedule.linear(0.8, step, 5) for step in range(6)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    expected = [0.25 * (1 + math.cos(math.pi * step / 9)) for step in range(10)]
    assert [schedule.cosine(0.5, step, 10) for step in range(10)] == pytest.approx(expected)
    assert [schedule.cubic(0.5, 0.1, step, 4) for step in range(5)] == pytest.approx(
        [0.5, 0.1 + 0.4 * 0.421875, 0.15, 0.1 + 0.4 / 64, 0.1]
    )


@pytest.mark.parametrize("falling", [schedule.linear, schedule.cosine])
def test_the_last_step_is_zero_and_so_is_an_only_step(falling):
    assert falling(0.5, 9, 10) == falling(0.5, 0, 1) == falling(0.5, 50, 10) == 0.0
    assert falling(0.5, 0, 2) == 0.5


def test_cubic_stays_at_its_end():
    assert schedule.cubic(0.9, 0.2, 7, 5) == 0.2


@pytest.mark.parametrize("call", [schedule.constant, schedule.linear, schedule.cosine])
def test_steps_that_cannot_be_are_refused(call):
    with pytest.raises(InvalidOption, match="`total=0`"):
        call(0.5, 0, 0)
    with pytest.raises(InvalidOption, match="`step=-1`"):
        call(0.5, -1, 3)
    with pytest.raises(InvalidOption, match="`total=0`"):
        schedule.cubic(0.5, 0.1, 0, 0)


def test_gradual_holds_still_outside_its_window():
    values = [schedule.gradual(0.9, 0.3, step, 4, 8) for step in range(12)]
    assert values[:5] == [0.9] * 5
    assert values[8:] == [0.3] * 4
    assert values[4:9] == sorted(values[4:9], reverse=True)
    assert len(set(values[4:9])) == 5


def test_a_window_needs_a_step():
    with pytest.raises(InvalidOption, match="`total=0`"):
        schedule.gradual(0.9, 0.3, 5, 4, 4)


def test_the_last_step_recurs_even_off_the_beat():
    assert [step for step in range(20) if schedule.recurs(step, 1, 10, 4)] == [1, 5, 9, 10]
    assert [step for step in range(20) if schedule.recurs(step, 0, 3, 100)] == [0, 3]
