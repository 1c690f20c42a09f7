"""Every file under configs/ is understood by the command, and the ones that need no download run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from helpers.slow import first_then_slow
from lightning_sparsefl.cli import SparseFLCLI, main

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "cluster")
QUICKSTART = CONFIGS / "quickstart.yaml"
GROUPS = {"algorithm", "model", "data"}
"""Without these a file is a part, to be stacked on another."""


class Parsed(Exception):
    """Before anything is instantiated."""


def named(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def parser():
    """The command's own parser; to build it takes longer than to parse a file."""

    def leave(cli, parser, args):
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sparsefl", "fit"])
        patch.setattr(SparseFLCLI, "parse_arguments", leave)
        with pytest.raises(Parsed) as caught:
            main(["fit"])
    parser = caught.value.args[0]
    parser.exit_on_error = False
    for verb in parser._subcommands_action.choices.values():
        verb.exit_on_error = False
    return parser


def stacked(path: Path) -> list[str]:
    """Arguments that make a complete run of a file."""
    whole = set(yaml.safe_load(path.read_text())) >= GROUPS
    return [f"--config={file}" for file in ([path] if whole else [QUICKSTART, path])]


def kind(path: Path) -> Path:
    """The table that a cell belongs to; other files are each of a kind of their own."""
    return path.parent if "paper" in path.parts else path


@pytest.mark.parametrize("path", first_then_slow(FILES, by=kind), ids=named)
def test_a_file_is_understood_and_all_it_says_arrives(path: Path, parser):
    parsed = parser.parse_args(["fit", *stacked(path)])
    arrived = yaml.safe_load(parser.dump(parsed))["fit"]
    stated = yaml.safe_load(path.read_text())
    assert stated
    assert_within(stated, arrived, named(path))


def assert_within(stated, arrived, where: str) -> None:
    if isinstance(stated, dict):
        for key, value in stated.items():
            assert key in arrived, f"{where}: {key} is lost"
            assert_within(value, arrived[key], f"{where}: {key}")
    elif where.endswith("class_path"):
        assert arrived.split(".")[-1] == stated.split(".")[-1], where
    else:
        assert arrived == stated, where


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_starts_by_saying_what_it_is(path: Path):
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# ")
    assert max(map(len, [first, *rest])) <= 120
    for line in (line for line in rest if "--config" in line):
        for name in line.split("--config ")[1:]:
            assert (CONFIGS.parent / name.strip()).is_file(), line


def test_the_quickstart_runs_a_round(tmp_path, capsys):
    arguments = ["--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false"]
    assert main(["fit", f"--config={QUICKSTART}", *arguments]) == 0
    assert "FedSpa after 1 rounds" in capsys.readouterr().out
    (summary,) = tmp_path.glob("runs/fast_dev_run/version_0/summary.json")
    assert json.loads(summary.read_text())["rounds"] == 1


def test_debug_on_top_of_the_quickstart_leaves_a_whole_run(tmp_path, capsys):
    files = [f"--config={file}" for file in (QUICKSTART, CONFIGS / "debug.yaml")]
    assert main(["fit", *files, "--trainer.enable_progress_bar=false"]) == 0
    run = tmp_path / "runs" / "FedSpa" / "version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 1
    assert (run / "checkpoints" / "last.ckpt").is_file()
    rows = (run / "clients.csv").read_text().splitlines()
    assert len(rows) - 1 in (2, 3, 4)  # two trained, two were scored
    assert list(run.glob("events.out.tfevents.*"))


def test_debug_stands_on_a_published_cell(capsys):
    cell = CONFIGS / "paper" / "fedspa" / "table1" / "emnist_letters_iid_fedspa_dst.yaml"
    files = [f"--config={file}" for file in (cell, CONFIGS / "debug.yaml")]
    assert main(["profile", *files, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["rounds"], content["client_rounds"]) == (1, 2)
    # One batch of 128 is trained on and another one searched with, dense.
    assert content["client_round"]["paper"]["flops"] == pytest.approx(3 * 128 * (content["forward_flops"] + DENSE))


DENSE = 2 * (20 * 25 * 576 + 50 * 500 * 64 + 800 * 500 + 500 * 26) + 20 * 576 + 50 * 64 + 500 + 26
"""FLOPs of LeNet-5: multiply-accumulates of two convolutions and two linear layers, and their biases."""
