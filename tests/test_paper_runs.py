"""The scripts that repeat the papers' runs: their commands, their tables, and that a stopped one goes on."""

from __future__ import annotations

import csv
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from lightning_sparsefl.cli import main

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "benchmarks" / "paper"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


@pytest.fixture(scope="module")
def runs():
    """The module that the scripts share."""
    spec = importlib.util.spec_from_file_location("_runs", FOLDER / "_runs.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "_runs", module)
        spec.loader.exec_module(module)
        yield module


def content(name, runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_run_has_its_own_name_and_a_configuration(name, runs):
    planned = content(name, runs)["RUNS"]
    assert len({run.key for run in planned}) == len(planned) > 1
    assert all((REPOSITORY / "configs" / run.config).is_file() for run in planned)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_document_shows_the_rows_of_the_csv(name, runs):
    table = content(name, runs)["table"](runs.read(runs.RESULTS / f"{name}.csv"))
    document = (REPOSITORY / "docs" / "results.md").read_text()
    assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in document
    assert runs.with_table(document, name, table) == document
    assert runs.with_table(document, name, "none") != document


@pytest.fixture
def in_process(monkeypatch, runs, tmp_path):
    """Runs commands in this process, and notes them; a number in `stops` is the round that one is killed in."""
    ran, stops = [], []

    def run(command, check):
        assert command[:4] == [sys.executable, "-m", "lightning_sparsefl.cli", "fit"]
        ran.append(command)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv[:1])
            patch.setattr(sys, "path", list(sys.path))
            if stops:
                patch.setattr("lightning_sparsefl.federated.rounds.coordinator.Coordinator.round", killed(stops.pop()))
            assert main(command[3:]) == 0

    monkeypatch.setattr(runs.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    return ran, stops


def killed(number):
    from lightning_sparsefl.federated.rounds.coordinator import Coordinator

    original = Coordinator.round

    def round_(self, state, *arguments):
        if state.server.round == number:
            raise RuntimeError("killed")
        return original(self, state, *arguments)

    return round_


QUICK = ("--trainer.max_rounds", "3", "--trainer.max_epochs", "1", "--trainer.logger", "false")


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_a_finished_one_is_left_alone(runs, in_process, tmp_path, capsys):
    ran, stops = in_process
    plan = [runs.Run("tiny", "quickstart.yaml", seed, QUICK, metric="personal/test_acc") for seed in (0, 1)]
    table = str(tmp_path / "tiny.csv")
    arguments = ["--data", "", "--folder", str(tmp_path / "runs"), "--out", table, "--commit", "abc"]
    runs.main(plan, "tiny", str, [*arguments, "--list"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert not ran
    stops.append(2)
    with pytest.raises(RuntimeError, match="killed"):
        runs.main(plan, "tiny", str, arguments)
    assert runs.read(Path(table)) == []
    runs.main(plan, "tiny", str, [*arguments, "--only", "tiny-seed0"])
    runs.main(plan, "tiny", str, arguments)
    runs.main(plan, "tiny", str, arguments)
    assert [("--ckpt_path" in command, command[command.index("--seed_everything") + 1]) for command in ran] == [
        (False, "0"),
        (True, "0"),
        (False, "1"),
    ]
    rows = runs.read(Path(table))
    assert [(row["run"], row["seed"], row["rounds"], row["commit"]) for row in rows] == [
        ("tiny", "0", "3", "abc"),
        ("tiny", "1", "3", "abc"),
    ]
    (folder,) = (tmp_path / "runs" / "tiny-seed0" / "FedSpa").glob("version_*")
    with (folder / "metrics.csv").open(newline="") as file:
        rounds = list(csv.DictReader(file))
    scores = [float(row["personal/test_acc"]) for row in rounds if row["personal/test_acc"]]
    assert float(rows[0]["final"]) == scores[-1]
    assert float(rows[0]["best"]) == max(scores)
    assert float(rows[0]["bytes_up"]) == float(rounds[-1]["comm/uplink_bytes_total"])
    assert float(rows[0]["seconds"]) > 0
    assert rows[0]["simulated"] == ""  # FedSpa has no devices


def test_simulated_seconds_are_added_up(runs, tmp_path):
    run = runs.Run("tiny", "quickstart.yaml")
    folder = tmp_path / run.key / "FedLPS" / "version_0"
    folder.mkdir(parents=True)
    counts = dict.fromkeys(runs._COUNTS.values(), 1)
    (folder / "summary.json").write_text(json.dumps({"rounds": 2, **counts}))
    (folder / "metrics.csv").write_text("global/test_acc,time/round,time/simulated\n,2,0.5\n0.75,2,0.25\n")
    row = run.row(tmp_path, "abc")
    assert (row["simulated"], row["seconds"], row["final"]) == (0.75, 4.0, 0.75)


def test_numbers_of_a_table(runs):
    rows = [{"final": "0.5"}, {"final": "0.7"}]
    assert runs.percent([]) == "-"
    assert runs.percent(rows[:1]) == "50.00"
    assert runs.percent(rows) == "60.00 (14.14)"
    assert runs.markdown(("a", "b"), [(1, 2)]) == "| a | b |\n|---|--:|\n| 1 | 2 |"
