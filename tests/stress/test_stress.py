"""Every stress script runs for a moment, and writes what its kept report has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparsefl import algorithms

FOLDER = Path(__file__).parent
INLINE = {
    "fuzz": ["--minutes", "0.002"],
    "engines": ["--minutes", "0.001"],
    "fleet": ["--cases", "6x2", "--ram", "6x2", "--ranks", "2", "--rounds", "1", "--data", "8"],
}
KILLING = {
    "kill_resume": ["--algorithms", "FedAvg", "--kills", "1"],
    "soak": ["--hours", "0.0001"],
}
ELSEWHERE = {"ranks", "elastic"}  # tests/contract/test_ranks.py; tests/test_cli.py kills a rank under torchrun


def kept(name):
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def keys(tree):
    return {name: keys(value) if isinstance(value, dict) else None for name, value in tree.items()}


def run(name, arguments, out):
    """Run a script in a process of its own, since some fork and some limit their memory; return report and output."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_each_script_is_tested_described_and_has_a_report():
    scripts = {path.stem for path in FOLDER.glob("[!_]*.py")} - {"conftest", "test_stress"}
    assert scripts == {*INLINE, *KILLING, *ELSEWHERE}
    described = (FOLDER / "README.md").read_text()
    for name in scripts:
        assert f"`python tests/stress/{name}.py" in described
        assert kept(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", INLINE)
def test_a_short_run_writes_the_keys_of_the_kept_report(name, tmp_path):
    report, printed = run(name, INLINE[name], tmp_path / "report.json")
    assert json.loads(printed) == report
    assert keys(report) == keys(kept(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLING)
def test_killed_runs_leave_what_straight_ones_do(name, tmp_path):
    report, _ = run(name, KILLING[name], tmp_path / "report.json")
    assert report.keys() == kept(name).keys()
    counts = kept(name)["algorithms"]["FedAvg"].keys()
    assert report["algorithms"], "the soak draws its methods"
    assert all(counted.keys() == counts for counted in report["algorithms"].values())


def test_the_kept_report_of_engines_has_stacks_and_no_difference():
    assert kept("engines")["stacked"] > 0
    assert kept("engines")["differences"] == 0


@pytest.mark.parametrize("name", KILLING)
def test_the_kept_report_has_the_methods_of_the_papers_and_no_difference(name):
    assert {"FedAvg", "FedSpa", "FedDIP", "PerFedMask", "FedLPS"} <= set(kept(name)["algorithms"])
    assert set(kept(name)["algorithms"]) <= set(algorithms.__all__)
    assert kept(name)["differences"] == 0
