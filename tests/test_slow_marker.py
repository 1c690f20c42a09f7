"""Which cases of a test are slow."""

from types import SimpleNamespace

import pytest

from helpers.slow import TimeLimit, first_then_slow, is_first, keep_named_tests


def test_all_but_the_first_value_are_slow():
    first, *rest = first_then_slow(["a", "b", "c"])
    assert first == "a"
    assert [(case.values, [mark.name for mark in case.marks]) for case in rest] == [
        (("b",), ["slow"]),
        (("c",), ["slow"]),
    ]


def test_the_first_of_each_kind_is_not_slow():
    cases = first_then_slow([1, "a", 2, "b", 3.0], by=type)
    assert [case for case in cases if not hasattr(case, "marks")] == [1, "a", 3.0]


@pytest.mark.parametrize(
    ("indices", "parameters", "expected"),
    [
        ({"x": 0, "y": 0}, (), True),
        ({"x": 0, "y": 1}, (), False),
        ({"x": 0, "y": 1}, ("x",), True),
        ({"x": 2, "y": 0}, ("x",), False),
        ({}, (), True),
    ],
)
def test_the_first_case_has_the_first_value_of_each_named_parameter(indices, parameters, expected):
    assert is_first(indices, parameters) == expected


def test_a_parameter_that_is_missing_is_refused():
    with pytest.raises(pytest.UsageError, match=r"slow_after_first names \['z'\], not among \['x'\]"):
        is_first({"x": 0}, ("z",))


@pytest.mark.parametrize(
    ("argument", "expression", "expected"),
    [
        ("tests/test_a.py::test_b[c]", "not slow", ""),
        ("tests/test_a.py", "not slow", "not slow"),
        ("tests/test_a.py::test_b", "slow", "slow"),
    ],
)
def test_a_test_that_is_named_by_its_id_runs(argument, expression, expected):
    config = SimpleNamespace(args=[argument], option=SimpleNamespace(markexpr=expression))
    keep_named_tests(config)
    assert config.option.markexpr == expected


@pytest.mark.parametrize(
    ("seconds", "marks", "skipped"), [(-1, ["slow"], True), (-1, [], False), (600, ["slow"], False)]
)
def test_a_slow_test_is_not_started_after_the_time_limit(seconds, marks, skipped):
    item = SimpleNamespace(get_closest_marker=lambda name: name in marks)
    try:
        TimeLimit(seconds).pytest_runtest_setup(item)
        found = False
    except pytest.skip.Exception:  # which would skip this test as well
        found = True
    assert found == skipped
