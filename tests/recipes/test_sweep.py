"""The sweep of docs/ with the real Optuna, where it is installed."""

import subprocess
import sys

import pytest

from helpers.command_line import ROOT


@pytest.mark.slow
def test_the_sweep_runs_and_goes_on(tmp_path):
    optuna = pytest.importorskip("optuna")
    command = [sys.executable, str(ROOT / "docs" / "sweep_optuna.py"), "--trials=1", "--rounds=1"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="density and lr", storage=f"sqlite:///{tmp_path}/sweep.db")
    assert [trial.number for trial in study.trials] == [0, 1]
    assert all(0 < trial.values[0] <= 1 and trial.values[1] > 0 for trial in study.trials)
    assert "MB up" in done.stdout
    assert (tmp_path / "runs/sweep/trial_1/summary.json").exists()
