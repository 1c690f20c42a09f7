"""`sparsefl configs`, configurations by name, and the completion of names in a shell."""

import os
import subprocess
import sys

import pytest
import yaml

from helpers.command_line import ROOT
from helpers.run_folders import write_run
from lightning_sparsefl.cli import main
from lightning_sparsefl.cli.packaged import config_names, packaged_config, packaged_files

CELL = "paper/fedspa/table1/cifar10_a_fedspa_dst"


def test_every_file_has_a_name_and_a_summary(sparsefl):
    files = [
        path
        for folder in ("configs", "callbacks")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix not in (".md", ".pyc")
    ]
    assert sorted(packaged_files().values()) == sorted(files)
    code, out, _ = sparsefl("configs")
    assert code == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    assert list(rows) == list(packaged_files())
    assert all(summary.strip() for summary in rows.values())
    assert rows["cluster/slurm.sh"].strip() == "Start a federation on several machines with SLURM:"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("quick", ["quickstart"]),
        ("QUICKSTART", ["quickstart"]),
        ("paper/fedspa/table1/cifar10_?_local", [f"paper/fedspa/table1/cifar10_{s}_local" for s in ("a", "b")]),
        ("callbacks/dp*", ["callbacks/dpf"]),
    ],
)
def test_a_pattern_selects_names(pattern, names, sparsefl):
    assert [line.split()[0] for line in sparsefl("configs", pattern)[1].splitlines()] == names


def test_a_file_is_printed_and_copied_and_never_replaced(sparsefl, tmp_path):
    text = (ROOT / "configs" / "debug.yaml").read_text()
    assert sparsefl("configs", "--show", "debug")[1] == text
    (tmp_path / "folder").mkdir()
    for destination, path in (
        ("mine.yaml", "mine.yaml"),
        ("folder", "folder/debug.yaml"),
        ("new/a.yaml", "new/a.yaml"),
    ):
        code, out, _ = sparsefl("configs", "--copy", "configs/debug.yaml", destination)
        assert (code, out) == (0, f"Copied to {path}\n")
        assert (tmp_path / path).read_text() == text
    (tmp_path / "mine.yaml").write_text("mine")
    code, _, err = sparsefl("configs", "--copy", "debug", "mine.yaml")
    assert code == 2
    assert "`--copy` would replace 'mine.yaml'" in err
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart", "configs/quickstart.yaml"])
def test_a_name_stands_for_its_file_in_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert packaged_config(name) == ROOT / "configs" / "quickstart.yaml"


def test_a_run_takes_names(sparsefl):
    code, out, _ = sparsefl(
        "fit", "--config", CELL, "-c=callbacks/sparsity_monitor", "--config=debug", "--print_config"
    )
    assert code == 0
    printed = yaml.safe_load(out)
    assert printed["model"]["class_path"].endswith("VGG11")
    assert printed["trainer"]["callbacks"][0]["class_path"].endswith("SparsityMonitor")
    assert printed["trainer"]["max_rounds"] == 1


def test_an_environment_variable_takes_names(sparsefl, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEFL_FIT__CONFIG", "quickstart")
    code, out, err = sparsefl("fit", "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["algorithm"]["class_path"].endswith("FedSpa")
    (tmp_path / "tabs.yaml").write_text("trainer:\n\tmax_rounds: 3\n")
    monkeypatch.setenv("SPARSEFL_FIT__CONFIG", "tabs.yaml")
    code, _, err = sparsefl("fit")
    assert code == 2
    assert "`SPARSEFL_FIT__CONFIG` is 'tabs.yaml', which is not YAML, as line 2, column 1 shows: " in err
    monkeypatch.setenv("SPARSEFL_FIT__CONFIG", "quikstart")
    code, _, err = sparsefl("fit")
    assert code == 2
    assert "`SPARSEFL_FIT__CONFIG` is 'quikstart', which does not exist; did you mean `quickstart`?" in err


def test_a_file_of_the_user_wins_over_a_name_and_reads_files_beside_it(sparsefl, tmp_path):
    folder = tmp_path / "paper" / "fedspa"
    folder.mkdir(parents=True)
    (tmp_path / "quickstart").write_text("trainer:\n  max_rounds: 77\nmodel: paper/fedspa/model.yaml\n")
    (folder / "model.yaml").write_text("class_path: MLP\n")
    options = ["--algorithm=FedAvg", "--data=FederatedDigits", "--print_config"]
    code, out, err = sparsefl("fit", "--config", "quickstart", *options)
    assert code == 0, err
    printed = yaml.safe_load(out)
    assert printed["trainer"]["max_rounds"] == 77
    assert printed["model"]["class_path"].endswith("MLP")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["fit", "-c", "quikstart"], "`--config` is 'quikstart', which does not exist; did you mean `quickstart`?"),
        (["fit", "--config", CELL.replace("fedspa_dst", "fedsp_dst")], f"did you mean `{CELL}`?"),
        (
            ["fit", "--config", "nothing/like/it"],
            "which does not exist; `sparsefl configs` lists those of the package.",
        ),
        (
            ["configs", "--show", "quikstart"],
            "No packaged configuration is called 'quikstart'; did you mean `quickstart`?",
        ),
        (["configs", "zzz"], "No packaged configuration matches 'zzz'; `sparsefl configs` lists"),
        (["configs", "--copy", "debug"], "--copy"),
    ],
)
def test_an_unknown_name_is_one_sentence(args, part, sparsefl):
    code, _, err = sparsefl(*args)
    assert code == 2
    assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize("args", [["configs"], ["compare", "run"]])
def test_an_output_without_reader_is_no_error(args, tmp_path, monkeypatch, capfd):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "argv", ["sparsefl"])
        monkeypatch.setattr(sys, "stdout", output)
        assert main(args) == 141
    assert capfd.readouterr().err == ""


def complete(script, *words):
    """Return what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    setup = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_sparsefl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{setup}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_subcommands_options_classes_and_names(sparsefl):
    pytest.importorskip("shtab", reason="extra `completion`")
    code, script, _ = sparsefl("--print_completion", "bash")
    assert code == 0
    assert complete(script, "sparsefl", "pro") == ["profile"]
    assert "--trainer.max_rounds" in complete(script, "sparsefl", "fit", "--trainer.max_r")
    assert complete(script, "sparsefl", "fit", "--algorithm", "FedSp") == ["FedSpa"]
    assert complete(script, "sparsefl", "fit", "--config", "quick") == ["quickstart"]
    assert complete(script, "sparsefl", "configs", "--show", "cluster/s") == ["cluster/slurm.sh"]
    assert complete(script, "sparsefl", "compare", "--me") == ["--metric"]
    assert set(config_names()) <= set(sparsefl("--print_completion", "zsh")[1].replace("; }", " ").split())


def test_completion_without_its_extra_names_it(sparsefl, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = sparsefl("--print_completion", "bash")
    assert code == 2
    assert "lightning-sparsefl[completion]" in err
