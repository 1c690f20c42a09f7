"""The command line in process; the fixture is in tests/conftest.py."""

import sys
from pathlib import Path

import pytest

from lightning_sparsefl import cli

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SHORT = [
    "--trainer.max_rounds=2",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--federation.clients_per_round=3",
    "--federation.pictures_every_n_rounds=0",
]


@pytest.fixture
def sparsefl(tmp_path, monkeypatch, capfd):
    """Run a command in an empty folder; return its exit code, standard output and standard error."""

    def run(*args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        monkeypatch.setattr(sys, "argv", ["sparsefl"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code or 0
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def run_folder(tmp_path, algorithm="FedSpa", version=0):
    return tmp_path / "runs" / algorithm / f"version_{version}"
