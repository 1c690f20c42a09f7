"""Which folders are runs, and what is read of one that is damaged, or still going."""

import json

import numpy as np
import pytest

from helpers.run_folders import read_table, write_run, write_table
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import load_runs
from lightning_sparsefl.report.reading.runs import names_of


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "runs" / "FedSpa" / "version_0", seed=7)


def test_a_run_is_read_whole(folder):
    (run,) = load_runs([folder])
    table = read_table(folder / "metrics.csv")
    assert (run.method, run.seed, run.rounds, run.is_finished) == ("FedSpa", "7", 6, True)
    for name in table[0]:
        expected = [float(row[name]) if row[name] else np.nan for row in table]
        np.testing.assert_array_equal(run.metrics[name], expected)
    lines = read_table(folder / "clients.csv")
    np.testing.assert_array_equal(run.clients["failure"], [float(bool(line["failure"])) for line in lines])
    assert run.clients["failure"].sum() == 1


def test_folders_of_runs_are_searched_at_any_depth_in_natural_order(tmp_path):
    for number in (10, 9, 1):
        write_run(tmp_path / "runs" / "FedSpa" / f"version_{number}", seed=number)
    write_run(tmp_path / "runs" / "FedAvg" / "version_0", "FedAvg")
    runs = load_runs([tmp_path / "runs"])
    assert names_of(runs) == ["FedAvg/version_0", "FedSpa/version_1", "FedSpa/version_9", "FedSpa/version_10"]
    (tmp_path / "runs" / "notes_\N{SUPERSCRIPT TWO}").mkdir()  # a digit that is not a number
    assert len(load_runs([tmp_path / "runs"])) == 4
    again = load_runs([tmp_path / "runs" / "FedSpa" / "version_9", tmp_path / "runs"])
    assert len(again) == 4
    assert again[0].seed == "9"


def test_the_table_of_a_csv_logger_is_no_run(tmp_path, folder):
    logs = tmp_path / "runs" / "lightning_logs"
    logs.mkdir()
    write_table(logs / "metrics.csv", [{"epoch": 0, "step": 1}])
    assert [run.path for run in load_runs([tmp_path / "runs"])] == [folder]


def test_a_run_that_is_still_going_can_be_read(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    whole = load_runs([folder])[0]
    for cut in (3, 40):  # within the last cell, and before it
        text = (folder / "metrics.csv").read_bytes()
        (folder / "metrics.csv").write_bytes(text[:-cut])
        run = load_runs([folder])[0]
        (folder / "metrics.csv").write_bytes(text)
        assert (whole.rounds, run.rounds, run.is_finished) == (6, 5, False)


def test_a_run_without_rounds_is_a_run(tmp_path):
    folder = write_run(tmp_path / "run", rounds=0, finished=False)
    assert load_runs([folder])[0].rounds == 0


def test_an_old_summary_does_not_finish_a_resumed_run(folder):
    (folder / "summary.json").write_text(json.dumps({"rounds": 3}))
    assert not load_runs([folder])[0].is_finished
    (folder / "summary.json").write_text("[" * 100_000)
    assert not load_runs([folder])[0].is_finished
    (folder / "summary.json").write_text("{")
    assert not load_runs([folder])[0].is_finished


@pytest.mark.parametrize("where", ["missing", "file", "empty"])
def test_what_is_no_run_is_refused(where, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match=f"`RUN` is '.*{where}', "):
        load_runs([tmp_path / where])


def test_no_path_is_refused():
    with pytest.raises(InvalidOption, match="`RUN` is empty"):
        load_runs([])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.csv", "round,a\n0,1\n1,1,1\n2,1\n"),
        ("metrics.csv", "round,a\n0,one\n"),
        ("metrics.csv", "round,a\n-1,1\n"),
        ("metrics.csv", "round,a\n1e30,1\n"),
        ("clients.csv", "client,trained\n0,1\n"),
        ("config.yaml", "- a list"),
        ("config.yaml", "a: [1"),
        ("config.yaml", "a: !!python/object/apply:os.system [true]"),
    ],
)
def test_a_damaged_file_is_named(name, text, folder):
    (folder / name).write_text(text)
    with pytest.raises(InvalidOption, match=name):
        load_runs([folder])


def test_values_that_are_not_finite_are_unknown(folder):
    (folder / "metrics.csv").write_text("round,a\n0,nan\n1,inf\n2,3\n")
    np.testing.assert_array_equal(load_runs([folder])[0].metrics["a"], [np.nan, np.nan, 3])


def test_a_carriage_return_in_a_failure_is_no_end_of_a_row(folder):
    rows = [{"round": number, "client": 0, "failure": text} for number, text in enumerate(("", "10%\r20%\r failed"))]
    write_table(folder / "clients.csv", rows)
    clients = load_runs([folder])[0].clients
    np.testing.assert_array_equal(clients["round"], [0, 1])
    np.testing.assert_array_equal(clients["failure"], [0, 1])
