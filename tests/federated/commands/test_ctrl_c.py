"""Ctrl-C before the first round, in a round, in an evaluation, in fine-tuning and in other commands: what is kept."""

import csv
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from helpers.networks import Classifier
from lightning_sparsefl import SNIP, Ditto, FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.commands.export import _Job
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.commands.simulation import Simulation
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.testing.contents import last_contents


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

    def run(verb="fit", ckpt_path=None, algorithm=None, every=1, store="ram", asked=None, rounds=3, tuned=1, **options):
        federation = {"finetune_epochs": tuned, "checkpoint_every_n_rounds": every, "store": store}
        trainer = FederatedTrainer(
            algorithm=algorithm or FedAvg(),
            federation=Federation(clients_per_round=2, **federation),
            accelerator="cpu",
            max_rounds=rounds,
            logger=False,
            enable_progress_bar=False,
            **options,
        )
        data = FederatedBlobs(num_clients=3, num_classes=4, dim=8, num_train=90, batch_size=8, eval_split="test")
        torch.manual_seed(0)
        return getattr(trainer, verb)(Classifier(), data, ckpt_path, **(asked or {}))

    return run


FOLDER = Path("runs/FedAvg/version_0")
FIT = {
    "in an evaluation": (
        "_score",
        5,
        2,
        "in the evaluation of round 2: 2 of 3 rounds are committed; `--ckpt_path {}` goes",
    ),
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


FORK = {"devices": 2, "strategy": "client_parallel_fork"}


class Counts(Callback):
    """Counts what a round calls, in a checkpoint too."""

    def __init__(self):
        self.calls = Counter()
        for hook in ("on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            setattr(self, hook, lambda *_, hook=hook: self.calls.update([hook]))

    def state_dict(self):
        return dict(self.calls)

    def load_state_dict(self, state):
        self.calls = Counter(state)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_an_evaluation_that_a_signal_ends_is_made_when_the_run_goes_on(ranks, store, command, monkeypatch):
    """Also between two commits, and in a second signal of the same evaluation; no round is trained again."""
    options = {"every": 3, "store": store, "callbacks": [Counts()], **ranks}
    with monkeypatch.context() as patch:
        for _ in range(2):
            with pytest.MonkeyPatch.context() as pressing:
                press_in_the_evaluation_of_the_second_round(pressing)
                with pytest.raises(KeyboardInterrupt):
                    command(ckpt_path="auto", **options)
            assert load_checkpoint(FOLDER / "checkpoints/last.ckpt")["epoch"] == 2
            patch.setattr(Node, "_train", never_before_the_third_round(Node._train))
        summary = command(ckpt_path="last", **options)
    assert summary == command(**{**options, "callbacks": [Counts()]})
    straight = FOLDER.with_name("version_1")
    assert last_contents(FOLDER) == last_contents(straight)
    for name in ("metrics.csv", "clients.csv"):
        assert untimed(FOLDER / name) == untimed(straight / name)


class Fails(Callback):
    """Fails when a round is recorded, and before it is committed."""

    def on_train_epoch_end(self, trainer, module):
        raise RuntimeError("failed")


def test_a_round_that_was_recorded_and_not_committed_has_one_row(command, monkeypatch):
    with monkeypatch.context() as patch:
        press_in_the_evaluation_of_the_second_round(patch)
        with pytest.raises(KeyboardInterrupt):
            command(tuned=0)
    with pytest.raises(RuntimeError, match="failed"):
        command(ckpt_path="last", tuned=0, callbacks=[Fails()])
    assert [row[0] for row in untimed(FOLDER / "metrics.csv")] == ["0", "1"]
    command(ckpt_path="last", tuned=0)
    assert [row[0] for row in untimed(FOLDER / "metrics.csv")] == ["0", "1", "2"]


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_the_commit_before_is_kept_where_a_round_is_committed_again(store, command, monkeypatch):
    options, folder = {"algorithm": Ditto(), "store": store}, Path("runs/Ditto/version_0")
    with monkeypatch.context() as patch:
        press_at(patch, Node, "_score", 8)
        with pytest.raises(KeyboardInterrupt):
            command(**options)
    command(ckpt_path="last", **options)
    epochs = [load_checkpoint(folder / f"checkpoints/{name}.ckpt")["epoch"] for name in ("previous", "last")]
    assert epochs == [2, 3]
    again = command("replay", ckpt_path=str(folder), asked={"client": trained_in(folder, 2)[0], "round": 2}, **options)
    assert again.round == 2


def trained_in(folder, number):
    with (folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [int(row["client"]) for row in rows if (row["round"], row["trained"]) == (str(number), "1")]


def press_in_the_evaluation_of_the_second_round(patch):
    score = Node._score

    def pressed(self, order, record):
        if order.round == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return score(self, order, record)

    patch.setattr(Node, "_score", pressed)


def never_before_the_third_round(train):
    def trained(self, order, record):
        assert order.round == 2
        return train(self, order, record)

    return trained


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


class Sends(Callback):
    """Sends the process a signal in a hook."""

    def __init__(self, hook, number):
        setattr(self, hook, lambda *_: os.kill(os.getpid(), number))


@pytest.fixture
def at_default():
    """As in a new process, which SIGTERM ends."""
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_set_up_says_what_a_signal_leaves(number, command, caplog, at_default):
    ends = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(ends) as stopped:
        command(callbacks=[Sends("setup", number)])
    assert getattr(stopped.value, "code", 143) == 143
    assert f"{number.name}: before the first round: nothing is written; start the run again." in caplog.text


@pytest.mark.slow_after_first
@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
def test_a_signal_when_nothing_is_left_to_stop_ends_the_program(ranks, command, at_default):
    """Else a script, or the next of several seeds, would go on."""
    with pytest.raises(SystemExit) as stopped:
        command(callbacks=[Sends("on_fit_end", signal.SIGTERM)], tuned=0, **ranks)
    assert stopped.value.code == 143
    assert (FOLDER / "summary.json").exists()


def test_the_table_of_fine_tuning_stays_until_a_further_round_is_committed(command):
    command()
    tuned = (FOLDER / "finetuned.csv").read_bytes()
    for hook, is_left in (("setup", True), ("on_train_epoch_start", True), ("on_train_epoch_end", False)):
        with pytest.raises(KeyboardInterrupt):
            command(ckpt_path="last", rounds=4, callbacks=[Sends(hook, signal.SIGINT)])
        assert (FOLDER / "finetuned.csv").exists() == is_left, hook
    command(ckpt_path="last", rounds=4)
    assert (FOLDER / "finetuned.csv").read_bytes() != tuned


def test_a_folder_with_a_space_is_quoted(command, caplog):
    with pytest.raises(KeyboardInterrupt):
        command(callbacks=[Sends("on_train_epoch_end", signal.SIGINT)], default_root_dir="my runs")
    assert "`--ckpt_path 'my runs/FedAvg/version_0'` goes on from there" in caplog.text


def test_code_that_changes_the_folder_does_not_divide_a_run(command, tmp_path):
    class Changes(Callback):
        def on_fit_start(self, trainer, pl_module):
            (tmp_path / "elsewhere").mkdir()
            os.chdir(tmp_path / "elsewhere")

    for store in ("ram", "disk"):
        summary = command(callbacks=[Changes()], store=store, default_root_dir=store)
        assert not list((tmp_path / "elsewhere").iterdir())
        os.chdir(tmp_path)
        (tmp_path / "elsewhere").rmdir()
        assert command(ckpt_path="last", store=store, default_root_dir=store) == summary


@pytest.mark.parametrize(("verb", "method"), [("test", "_score"), ("replay", "_train")])
def test_commands_that_write_nothing_say_so(verb, method, command, caplog, monkeypatch):
    command()
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    press_at(monkeypatch, Node, method, 1)
    asked = {"client": 1, "round": 2} if verb == "replay" else {}
    with pytest.raises(KeyboardInterrupt):
        command(verb, ckpt_path=str(FOLDER), asked=asked)
    assert f"SIGINT: nothing is written; {FOLDER} is as it was." in caplog.text
    assert before == {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("method", "kept"), [("_checkpoint", "no file is written."), ("_score", "complete files: ")])
def test_an_export_lists_its_complete_files(method, kept, command, caplog, monkeypatch):
    command()
    press_at(monkeypatch, _Job, method, 1)
    with pytest.raises(KeyboardInterrupt):
        command("export", asked={"check": True})
    assert f"SIGINT: {kept}" in caplog.text
    files = sorted(path.name for path in FOLDER.glob("export/global/*"))
    assert files == (["model.ckpt", "model.safetensors"] if method == "_score" else [])
    assert all(name in caplog.text for name in files)


def test_a_profile_says_that_nothing_is_written(command, caplog, monkeypatch):
    press_at(monkeypatch, Simulation, "_simulate", 1)
    with pytest.raises(KeyboardInterrupt):
        command("profile")
    assert "SIGINT: nothing is written." in caplog.text
    assert not Path("runs").exists()
