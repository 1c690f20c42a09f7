"""Ctrl-C before the first round, in a round, in an evaluation, in fine-tuning and in other commands: what is kept."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import SNIP, FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.commands import profile as profiling
from lightning_sparsefl.federated.commands.export import _Job
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint


@pytest.fixture(autouse=True)
def python_s_handler():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers of signals are set in the main thread, and the tests run in another one")
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(verb="fit", ckpt_path=None, algorithm=None, every=1, **asked):
        trainer = FederatedTrainer(
            algorithm=algorithm or FedAvg(),
            federation=Federation(clients_per_round=2, finetune_epochs=1, checkpoint_every_n_rounds=every),
            accelerator="cpu",
            max_rounds=3,
            logger=False,
            enable_progress_bar=False,
        )
        data = FederatedBlobs(num_clients=3, num_classes=4, dim=8, num_train=90, batch_size=8, eval_split="test")
        torch.manual_seed(0)
        return getattr(trainer, verb)(Classifier(), data, ckpt_path, **asked)

    return run


FOLDER = Path("runs/FedAvg/version_0")
FIT = {
    "in an evaluation": ("_score", 5, 1, "in the evaluation of round 2: 1 of 3 rounds are committed"),
    "in round 1": ("_train", 2, 0, "in round 1: no round is committed; `--ckpt_path {}` starts the run over"),
    "in round 3": ("_train", 5, 2, "in round 3: 2 of 3 rounds are committed; `--ckpt_path {}` goes on"),
    "in fine-tuning": ("_finetune", 2, 3, "in fine-tuning: 3 of 3 rounds are committed; `--ckpt_path {}` goes on"),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("where", FIT)
def test_a_run_says_how_many_rounds_are_committed_and_goes_on(where, command, caplog, monkeypatch):
    method, call, committed, sentence = FIT[where]
    with monkeypatch.context() as patch:
        press_at(patch, Node, method, call)
        with pytest.raises(KeyboardInterrupt):
            command()
    assert f"SIGINT {sentence.format(FOLDER)}" in caplog.text
    last = FOLDER / "checkpoints/last.ckpt"
    assert (load_checkpoint(last)["epoch"] if last.exists() else 0) == committed
    summary = command(ckpt_path=str(FOLDER))
    assert summary == command()
    first, second = (untimed(folder / "metrics.csv") for folder in (FOLDER, FOLDER.with_name("version_1")))
    assert first == second


@pytest.mark.slow
def test_a_round_without_its_evaluation_is_not_committed(command, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        press_at(patch, Node, "_score", 5)
        with pytest.raises(KeyboardInterrupt):
            command(every=3)
    assert "SIGINT in the evaluation of round 2: no round is committed" in caplog.text
    assert command(ckpt_path="last", every=3) == command(every=3)


def press_at(patch, kind, method, call):
    original, calls = getattr(kind, method), []

    def pressed(self, *args, **kwargs):
        calls.append(method)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    patch.setattr(kind, method, pressed)


def untimed(path):
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    return [[cell for name, cell in zip(header, row, strict=True) if not name.startswith("time/")] for row in rows]


def test_a_survey_before_the_first_round_leaves_nothing(command, caplog, monkeypatch):
    press_at(monkeypatch, Node, "_survey", 2)
    with pytest.raises(KeyboardInterrupt):
        command(algorithm=SNIP(density=0.5))
    assert "SIGINT: before the first round: nothing is written; start the run again." in caplog.text
    assert not Path("runs").exists()


def test_the_set_up_of_a_resumed_run_leaves_it_as_it_was(command, caplog, monkeypatch):
    command()
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    press_at(monkeypatch, Run, "_restore", 1)
    with pytest.raises(KeyboardInterrupt):
        command(ckpt_path="last")
    assert f"before the first round: nothing is written; `--ckpt_path {FOLDER}` starts from its last" in caplog.text
    assert before == {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("verb", "method"), [("test", "_score"), ("replay", "_train")])
def test_commands_that_write_nothing_say_so(verb, method, command, caplog, monkeypatch):
    command()
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    press_at(monkeypatch, Node, method, 1)
    asked = {"client": 1, "round": 2} if verb == "replay" else {}
    with pytest.raises(KeyboardInterrupt):
        command(verb, ckpt_path=str(FOLDER), **asked)
    assert f"SIGINT: nothing is written; {FOLDER} is as it was." in caplog.text
    assert before == {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("method", "kept"), [("_checkpoint", "no file is written."), ("_score", "complete files: ")])
def test_an_export_lists_its_complete_files(method, kept, command, caplog, monkeypatch):
    command()
    press_at(monkeypatch, _Job, method, 1)
    with pytest.raises(KeyboardInterrupt):
        command("export", check=True)
    assert f"SIGINT: {kept}" in caplog.text
    files = sorted(path.name for path in FOLDER.glob("export/global/*"))
    assert files == (["model.ckpt", "model.safetensors"] if method == "_score" else [])
    assert all(name in caplog.text for name in files)


def test_a_profile_says_that_nothing_is_written(command, caplog, monkeypatch):
    press_at(monkeypatch, profiling._Simulation, "_simulate", 1)
    with pytest.raises(KeyboardInterrupt):
        command("profile")
    assert "SIGINT: nothing is written." in caplog.text
    assert not Path("runs").exists()
