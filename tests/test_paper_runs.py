"""The scripts that repeat the papers' runs: their commands, rows and tables, and that a stopped one goes on."""

from __future__ import annotations

import csv
import importlib
import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_sparsefl.cli import main

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "benchmarks" / "paper"
SHARED_ROWS = ("claim", "collect", "figures")
"""Scripts without rows of their own; see `test_paper_claim.py`."""
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem not in SHARED_ROWS)
COUNTED = ("fedspa_search", "perfedmask_rates")
"""Scripts without runs of ``sparsefl fit``."""
MODULES = ("_rows", "_tables", "_runs")


@pytest.fixture(scope="module")
def shared():
    """The modules that the scripts share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def runs(shared):
    return shared["_runs"]


@pytest.fixture(scope="module")
def rows(shared):
    return shared["_rows"]


@pytest.fixture(scope="module")
def tables(shared):
    return shared["_tables"]


def content(name, shared):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in COUNTED])
def test_every_run_has_its_own_name_and_a_configuration(name, shared):
    planned = content(name, shared)["RUNS"]
    assert len({run.key for run in planned}) == len(planned) > 1
    assert all((REPOSITORY / "configs" / run.config).is_file() for run in planned)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_document_shows_the_rows_of_the_csv(name, shared, rows, tables):
    table = content(name, shared)["table"](rows.read(rows.RESULTS / f"{name}.csv"))
    document = (REPOSITORY / "docs" / "results.md").read_text()
    assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in document
    assert tables.with_table(document, name, table) == document
    assert tables.with_table(document, name, "none") != document


@pytest.fixture
def in_process(monkeypatch, runs, tmp_path):
    """Runs commands in this process, and notes them; a number in `stops` is the round that one is killed in."""
    ran, stops = [], []

    def run(command, seconds):
        assert command[:4] == [sys.executable, "-m", "lightning_sparsefl.cli", "fit"]
        ran.append(command)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv[:1])
            patch.setattr(sys, "path", list(sys.path))
            if stops:
                patch.setattr("lightning_sparsefl.federated.rounds.coordinator.Coordinator.round", killed(stops.pop()))
            return main(command[3:])

    monkeypatch.setattr(runs, "finish", run)
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
def test_a_stopped_run_goes_on_and_a_finished_one_is_left_alone(runs, rows, in_process, tmp_path, capsys):
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
    assert rows.read(Path(table)) == []
    runs.main(plan, "tiny", str, [*arguments, "--only", "tiny-seed0"])
    runs.main(plan, "tiny", str, arguments)
    runs.main(plan, "tiny", str, arguments)
    assert [("--ckpt_path" in command, command[command.index("--seed_everything") + 1]) for command in ran] == [
        (False, "0"),
        (True, "0"),
        (False, "1"),
    ]
    found = rows.read(Path(table))
    assert [(row["run"], row["seed"], row["rounds"], row["commit"]) for row in found] == [
        ("tiny", "0", "3", "abc"),
        ("tiny", "1", "3", "abc"),
    ]
    (folder,) = (tmp_path / "runs" / "tiny-seed0" / "FedSpa").glob("version_*")
    with (folder / "metrics.csv").open(newline="") as file:
        rounds = list(csv.DictReader(file))
    scores = [float(row["personal/test_acc"]) for row in rounds if row["personal/test_acc"]]
    assert float(found[0]["final"]) == scores[-1]
    assert float(found[0]["best"]) == max(scores)
    assert float(found[0]["bytes_up"]) == float(rounds[-1]["comm/uplink_bytes_total"])
    assert float(found[0]["seconds"]) > 0
    assert found[0]["simulated"] == ""  # FedSpa has no devices
    curves = rows.read(tmp_path / "tiny_curves.csv")
    assert Counter(point["seed"] for point in curves) == {"0": len(scores), "1": len(scores)}
    assert float(curves[len(scores) - 1]["accuracy"]) == pytest.approx(scores[-1], abs=1e-4)


def test_simulated_seconds_are_added_up(runs, tmp_path):
    run = runs.Run("tiny", "quickstart.yaml")
    folder = tmp_path / run.key / "FedLPS" / "version_0"
    folder.mkdir(parents=True)
    counts = dict.fromkeys(runs._COUNTS.values(), 1)
    (folder / "summary.json").write_text(json.dumps({"rounds": 2, **counts}))
    (folder / "metrics.csv").write_text("global/test_acc,time/round,time/simulated\n,2,0.5\n0.75,2,0.25\n")
    row = run.row(tmp_path, "abc")
    assert (row["simulated"], row["seconds"], row["final"]) == (0.75, 4.0, 0.75)


def test_a_curve_has_few_points_and_ends_with_the_last_round(runs, tmp_path):
    run = runs.Run("long", "quickstart.yaml")
    folder = tmp_path / run.key / "FedAvg" / "version_0"
    folder.mkdir(parents=True)
    head = "round,global/test_acc,comm/uplink_bytes_total,comm/downlink_bytes_total,flops/train_total,time/simulated"
    lines = [f"{number},{number / 200},{number},{2 * number},{10 * number},0.5" for number in range(1, 101)]
    (folder / "metrics.csv").write_text("\n".join([head, *lines]))
    points = run.curve(tmp_path)
    assert [point["round"] for point in points] == [str(number) for number in range(4, 101, 4)]
    assert points[-1] == {
        "run": "long",
        "seed": 0,
        "round": "100",
        "accuracy": "0.5000",
        "bytes": 300,
        "flops": 1000.0,
        "simulated": 50.0,
    }


def test_a_failed_run_does_not_stop_the_others(runs, rows, tmp_path, monkeypatch):
    codes = {"0": 1, "1": 0}
    monkeypatch.setattr(runs, "finish", lambda command, seconds: codes[command[command.index("--seed_everything") + 1]])
    monkeypatch.setattr(runs.Run, "row", lambda run, folder, commit: {"run": run.name, "seed": run.seed})
    monkeypatch.setattr(runs.Run, "curve", lambda run, folder: [])
    plan = [runs.Run("tiny", "quickstart.yaml", seed) for seed in (0, 1)]
    with pytest.raises(SystemExit, match="tiny-seed0"):
        runs.main(plan, "tiny", str, ["--out", str(tmp_path / "rows.csv"), "--commit", "abc"])
    assert [row["seed"] for row in rows.read(tmp_path / "rows.csv")] == ["1"]


def test_a_run_is_stopped_at_the_end_of_the_time(runs):
    assert runs.finish([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert runs.finish([sys.executable, "-c", "import time; time.sleep(60)"], 0.1) is None
    assert runs.finish(["this command does not exist"], 0) is None


def test_numbers_of_a_table(tables):
    own = [{"final": "0.5", "seconds": "20", "rounds": "10"}, {"final": "0.7", "seconds": "40", "rounds": "10"}]
    assert tables.percent([]) == tables.mean([], "final") == tables.seconds_a_round([]) == "-"
    assert tables.percent(own[:1]) == "50.00"
    assert tables.percent(own) == "60.00 (14.14)"
    assert tables.mean(own, "seconds", 10) == "3.00"
    assert tables.seconds_a_round(own) == "3.0"
    assert tables.markdown(("a", "b"), [(1, 2)]) == "| a | b |\n|---|--:|\n| 1 | 2 |"


def test_the_published_accuracy_is_that_of_the_header(tables):
    assert tables.published("paper/feddip/table3/fashion_mnist_feddip.yaml") == "88.26"
    assert tables.published("paper/perfedmask/table5/cifar100_optimized.yaml") == "29.84"
    assert tables.published("paper/feddip/figure6/fashion_mnist_density0.01.yaml") == "-"


def test_every_row_names_a_commit_of_the_history(rows):
    try:
        if rows.git("rev-parse", "--is-shallow-repository") == "true":
            pytest.skip("a shallow clone has no history")
        history = rows.git("rev-list", "HEAD").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a repository")
    files = [path for path in rows.RESULTS.glob("*.csv") if not path.stem.endswith("_curves")]
    named = {row["commit"].removesuffix("-dirty") for path in files for row in rows.read(path)}
    unknown = {name for name in named if len(name) < 7 or not any(commit.startswith(name) for commit in history)}
    assert named
    assert not unknown


def test_tiny_cells_ask_for_no_files(shared, tmp_path):
    assert not any("--data.root" in run.command(tmp_path, "data") for run in content("tiny", shared)["RUNS"])


@pytest.mark.slow
def test_tiny_cells_still_have_the_numbers_of_their_rows(runs, rows, shared, in_process, tmp_path):
    out = tmp_path / "tiny.csv"
    arguments = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--commit", "abc"]
    runs.main(content("tiny", shared)["RUNS"], "tiny", str, arguments)
    kept, again = (rows.read(path) for path in (rows.RESULTS / "tiny.csv", out))
    assert [row["run"] for row in again] == [row["run"] for row in kept]
    for old, new in zip(kept, again, strict=True):
        same = all(old[column] == new[column] for column in ("device", "torch"))
        for column in ("final", "best", "best5", "bytes_up", "bytes_down", "flops_train", "density"):
            expected, found = float(old[column]), float(new[column])
            assert found == (expected if same else pytest.approx(expected, rel=1e-3, abs=1e-3)), (old["run"], column)


def test_rows_of_another_machine_are_taken_over_once(shared, rows, tmp_path):
    merge = content("collect", shared)["merge"]
    files = {
        "runs": ({"run": "a", "seed": 0, "device": "x"}, {"run": "a", "seed": 0, "device": "y"}, rows.COLUMNS),
        "curves": ({"run": "a", "seed": 0, "round": 1}, {"run": "a", "seed": 0, "round": 1}, rows.CURVE),
        "seconds": ({"task": "a", "device": "x"}, {"task": "a", "device": "x"}, ("task", "device")),
    }
    for name, (old, same, columns) in files.items():
        source, target = tmp_path / f"{name}.csv", tmp_path / f"{name}_merged.csv"
        rows.append(target, [old], columns)
        new = {key: "b" if key in ("run", "task") else value for key, value in old.items()}
        rows.append(source, [same, new], columns)
        assert [merge(source, target), merge(source, target)] == [1, 0]
        first, second = rows.read(target)
        assert first == {**dict.fromkeys(columns, ""), **{key: str(value) for key, value in old.items()}}
        assert second["run" if "run" in columns else "task"] == "b"


def test_the_script_for_gpus_passes_its_options_on(tmp_path, monkeypatch):
    seen, fake, script = tmp_path / "seen", tmp_path / "bin" / "python", str(FOLDER / "gpu.sh")
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {seen}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    options = ["--dry-run", "--folder", str(tmp_path / "runs"), "--minutes", "3", "--only", "a*", "--commit", "abc"]
    assert subprocess.run(["bash", script, *options], check=False).returncode == 0
    assert seen.read_text().split() == [
        *("benchmarks/paper/tiny.py", "--data", "--folder", str(tmp_path / "runs")),
        *("--out", str(tmp_path / "runs" / "tiny.csv"), "--only", "a*", "--minutes", "3", "--commit", "abc"),
    ]
    assert subprocess.run(["bash", script, "--nonsense"], check=False, capture_output=True).returncode == 2
