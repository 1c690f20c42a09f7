"""Every benchmark runs, and writes what its README promises; no time is asserted."""

import json
import runpy
from pathlib import Path

import pytest

from lightning_sparsefl.federated import algorithm

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = {
    "local_trainer": ["--steps", "2", "--cycles", "1"],
    "federated_round": ["--clients", "2", "--samples", "30", "--rounds", "2"],
}


def run(name, arguments, monkeypatch):
    script = FOLDER / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def numbers(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, float):
            yield value


def test_each_script_is_tested_described_and_measured():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == set(TINY)
    described = (FOLDER / "README.md").read_text()
    for name in scripts:
        assert f"`{name}.py`" in described
        assert (FOLDER / "results" / f"{name}.json").is_file()


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_run_writes_the_keys_of_the_kept_result(name, tmp_path, monkeypatch, capsys):
    run(name, [*TINY[name], "--out", str(tmp_path / "result.json")], monkeypatch)
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert all(number >= 0 for number in numbers(result))
    assert keys(result) == keys(json.loads((FOLDER / "results" / f"{name}.json").read_text()))


def keys(tree):
    return {name: keys(value) if isinstance(value, dict) else None for name, value in tree.items()}


def test_a_round_stops_where_the_two_sides_end_with_different_weights(monkeypatch):
    adopt = algorithm._adopt
    monkeypatch.setattr(algorithm, "_adopt", lambda *arguments: adopt(*arguments) + 1e-3)
    with pytest.raises(SystemExit, match="different weights"):
        run("federated_round", [*TINY["federated_round"], "--cases", "mlp"], monkeypatch)
