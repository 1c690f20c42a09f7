"""A checkpoint or a run folder is enough for every subcommand, since the configuration lies beside it."""

import json
import pickle
import shutil

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from helpers.command_line import QUICKSTART, SHORT, run_folder
from lightning_sparsefl.cli.run_config import SavedConfig, with_run_config

VERBS = {"fit", "test"}


@pytest.fixture
def run(sparsefl, tmp_path):
    """The folder of a finished run."""
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    return run_folder(tmp_path)


def test_a_checkpoint_is_evaluated_replayed_exported_and_resumed(sparsefl, run, tmp_path):
    last = run / "checkpoints" / "last.ckpt"
    code, out, _ = sparsefl("test", "--ckpt_path", last)
    summary = json.loads((run / "summary.json").read_text())
    assert code == 0
    assert f"{summary['personal/test_acc']:.4f}" in out
    client = torch.load(run / "checkpoints" / "previous.ckpt", weights_only=True)["epoch"]
    assert client == 1
    code, _, err = sparsefl("replay", "--ckpt_path", last)
    assert code == 2
    assert "No value for `client`; expected --client VALUE." in err
    code, _, err = sparsefl("replay", "--ckpt_path", last, "--client=99")
    assert code == 2
    (client,) = err.split("expected one of ")[1].split(",")[:1]
    code, out, err = sparsefl("replay", f"--ckpt_path={run}", f"--client={client}")
    assert code == 0, err
    assert f"Client {client} in round 1, again" in out
    assert sparsefl("export", "--ckpt_path", run, "--out=exported")[0] == 0
    code, _, err = sparsefl("export", "--ckpt_path", run, "--formats=onnx")
    assert code == 2
    assert "`formats` is 'onnx'; expected a list, as in '[a, b]'" in err
    code, _, err = sparsefl("export", "--ckpt_path", run, f"--out={last}")
    assert code == 2
    assert "which is a file; expected a folder" in err
    assert sparsefl("fit", "--ckpt_path", run, "--trainer.max_rounds=3")[0] == 0
    assert torch.load(last, weights_only=True)["epoch"] == 3
    assert not run_folder(tmp_path, version=1).exists()
    code, _, err = sparsefl("validate", "--ckpt_path", last)
    assert code == 2
    assert "val_fraction" in err


def test_the_configuration_can_be_sent_on(tmp_path):
    parser = LightningArgumentParser()
    parser.add_argument("--rate", type=float, default=0.5)
    saved = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(SavedConfig(parser, parser.get_defaults())))))
    saved.parser.save(saved.config, str(tmp_path / "config.yaml"), overwrite=True)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"rate": 0.5}


@pytest.mark.slow
def test_the_configuration_is_written_by_a_spawned_process(sparsefl, run, tmp_path):
    options = ["--trainer.devices=2", "--trainer.strategy=client_parallel_spawn", "--trainer.max_rounds=1"]
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, *options)
    assert code == 0, err
    parts = [yaml.safe_load((run_folder(tmp_path, version=version) / "config.yaml").read_text()) for version in (0, 1)]
    assert parts[1]["trainer"] == parts[0]["trainer"] | {
        "devices": 2,
        "strategy": "client_parallel_spawn",
        "max_rounds": 1,
    }
    assert parts[1]["model"] == parts[0]["model"]


def test_a_path_may_begin_in_the_home_folder(sparsefl, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sparsefl("test", f"--ckpt_path=~/{run.relative_to(tmp_path)}")[0] == 0


def test_a_given_configuration_takes_precedence(sparsefl, run):
    (run / "config.yaml").write_text("algorithm: FedProx\n")
    assert sparsefl("test", "--config", QUICKSTART, "--ckpt_path", run)[0] == 0


def test_a_checkpoint_without_a_configuration_says_what_is_missing(sparsefl, run, tmp_path):
    copy = shutil.copy(run / "checkpoints" / "last.ckpt", tmp_path / "mine.ckpt")
    code, _, err = sparsefl("test", "--ckpt_path", "last")
    assert code == 2
    assert "No value for `algorithm`, `data`, `model`; expected options, a file in `--config`" in err
    expected = "expected such a folder, or `algorithm`, `data`, `model` by options or a file in `--config`."
    for command, path, where in (("test", copy, "not in"), ("fit", run.parent, "not"), ("export", run.parent, "not")):
        code, _, err = sparsefl(command, "--ckpt_path", path)
        assert code == 2
        assert f"`ckpt_path` is '{path}', which is {where} a run folder with a config.yaml; {expected}" in err


def test_an_empty_path_is_refused(sparsefl):
    """As of a variable of the shell that is not set."""
    code, _, err = sparsefl("test", "--ckpt_path", "")
    assert (code, "`ckpt_path` is ''; expected a run folder" in err) == (2, True)


def test_a_folder_without_a_checkpoint_is_refused(sparsefl, tmp_path):
    code, _, err = sparsefl("test", "--config", QUICKSTART, "--ckpt_path", tmp_path)
    assert code == 2
    assert "contains no checkpoints/last.ckpt" in err


@pytest.mark.parametrize("command", ["fit", "test", "export"])
def test_a_path_with_nothing_there_is_named(command, sparsefl):
    code, _, err = sparsefl(command, "--ckpt_path", "nowhere/last.ckpt")
    assert code == 2
    assert "`ckpt_path` is 'nowhere/last.ckpt', which does not exist; expected a run folder or a checkpoint." in err


def test_a_path_with_nothing_there_is_named_beside_a_configuration(sparsefl):
    code, _, err = sparsefl("profile", "--config", QUICKSTART, "--ckpt_path", "nowhere")
    assert code == 2
    assert "`ckpt_path` is 'nowhere', which does not exist; expected a run folder or a checkpoint." in err


@pytest.mark.parametrize(
    "args",
    [
        ["test"],
        ["test", "--ckpt_path"],
        ["test", "--ckpt_path=last"],
        ["test", "--ckpt_path=null"],
        ["test", "-c", "x.yaml", "--ckpt_path=RUN"],
        ["--config=x.yaml", "test", "--ckpt_path=RUN"],
        ["test", "--algorithm=FedAvg", "--model=MLP", "--data", "FederatedDigits", "--ckpt_path=RUN"],
        ["--version"],
    ],
)
def test_nothing_is_inserted_otherwise(args, tmp_path):
    (tmp_path / "config.yaml").touch()
    args = [arg.replace("RUN", str(tmp_path)) for arg in args]
    assert with_run_config(args, VERBS) == args


@pytest.mark.parametrize("value", ["RUN", "last", "null"])
@pytest.mark.parametrize("equals", [True, False])
def test_a_later_configuration_does_not_take_the_checkpoint_away(value, equals, tmp_path):
    value = value.replace("RUN", str(tmp_path))
    option = [f"--ckpt_path={value}"] if equals else ["--ckpt_path", value]
    others = ["--config", "x.yaml", "--trainer.max_rounds", "3"]
    assert with_run_config(["fit", *option, *others], VERBS) == ["fit", *others, *option]


def test_a_run_is_scored_by_its_own_configuration_in_either_order(sparsefl, run):
    options = [["--ckpt_path", str(run)], ["--config", str(run / "config.yaml")]]
    shown = [sparsefl("test", *first, *second)[1] for first, second in (options, options[::-1])]
    scores = [[line for line in text.splitlines() if "_acc" in line or "_loss" in line] for text in shown]
    assert scores[0] == scores[1]
    assert scores[0]


def test_the_environment_can_give_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").touch()
    args = ["fit", f"--ckpt_path={tmp_path}"]
    assert with_run_config(args, VERBS) == ["fit", f"--config={tmp_path / 'config.yaml'}", args[1]]
    monkeypatch.setenv("SPARSEFL_FIT__CONFIG", "x.yaml")
    assert with_run_config(args, VERBS) == args
