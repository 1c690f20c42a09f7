"""Which cases of a test are slow."""

import os
from types import SimpleNamespace

import pytest

from helpers.slow import TimeLimit, first_then_slow, is_first, keep_named_tests, mark_slow_cases


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


class Collected:
    """Plugin that marks slow cases and keeps the names of the others."""

    def pytest_collection_modifyitems(self, items):
        mark_slow_cases(items)
        self.plain = [item.name for item in items if not item.get_closest_marker("slow")]

    def pytest_configure(self, config):
        config.addinivalue_line("markers", "slow_after_first(*names): see helpers.slow")
        config.addinivalue_line("markers", "slow: see helpers.slow")


@pytest.mark.parametrize(
    ("marker", "plain"),
    [
        ("", ["test_it[p-x]"]),
        ("('a')", ["test_it[p-x]", "test_it[q-x]"]),
        ("('b')", ["test_it[p-x]", "test_it[p-y]", "test_it[p-z]"]),
        ("('a', 'b')", ["test_it[p-x]"]),
    ],
)
def test_cases_with_the_first_value_of_each_named_parameter_are_not_slow(marker, plain, tmp_path):
    """As pytest collects them: it numbers the cases of a test in more than one way."""
    (tmp_path / f"{tmp_path.name}.py").write_text(  # a name of its own, by which Python knows it
        "import pytest\n"
        f"@pytest.mark.slow_after_first{marker}\n"
        "@pytest.mark.parametrize('a', ['x', 'y', 'z'])\n"
        "@pytest.mark.parametrize('b', ['p', 'q'])\n"
        "def test_it(a, b): pass\n"
        "@pytest.mark.slow_after_first\n"
        "def test_without_cases(): pass\n"
    )
    found = Collected()
    options = ["--import-mode=importlib", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(tmp_path)]
    assert pytest.main([*options, "-q", "--collect-only", str(tmp_path)], plugins=[found]) == pytest.ExitCode.OK
    assert sorted(found.plain) == sorted([*plain, "test_without_cases"])


def test_a_parameter_that_is_missing_is_refused():
    with pytest.raises(pytest.UsageError, match=r"slow_after_first names \['z'\], not among \['x'\]"):
        is_first({"x": 0}, {"x": 0}, ("z",))


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
