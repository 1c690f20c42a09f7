"""Progress over rounds: a bar in a terminal, a line for each evaluated round elsewhere, nothing for a quiet trainer."""

import logging
import re

import pytest

from helpers.networks import Classifier
from lightning_sparsefl import SNIP, FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import Oort, RoundProgressBar
from lightning_sparsefl.federated.tracking import phase_progress, progress_bar


@pytest.fixture
def fit(tmp_path):
    def run(verb="fit", ckpt_path=None, algorithm=None, asked=None, finetune_epochs=0, sampler=None, **options):
        trainer = FederatedTrainer(
            algorithm=algorithm or FedAvg(),
            federation=Federation(clients_per_round=2, finetune_epochs=finetune_epochs, sampler=sampler),
            accelerator="cpu",
            max_rounds=options.pop("max_rounds", 4),
            default_root_dir=str(tmp_path),
            **options,
        )
        data = FederatedBlobs(
            num_clients=3, num_classes=4, dim=8, num_train=90, batch_size=8, eval_split="test", drop_last=True
        )
        getattr(trainer, verb)(Classifier(), data, ckpt_path, **(asked or {}))

    return run


SCORES = r"global test_acc \d\.\d{3}  personal test_acc \d\.\d{3}"
LINE = rf"round (\d)/4  {SCORES}  up [\d.]+ kB  elapsed \d\d:\d\d  remaining \d\d:\d\d"


def test_outside_a_terminal_each_evaluated_round_has_a_line(fit, capsys):
    fit(check_val_every_n_round=2, logger=False)
    out = capsys.readouterr().out
    assert "\r" not in out
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert [re.fullmatch(LINE, line)[1] for line in lines] == ["2", "4"]


def test_a_bar_shows_the_clients_of_training_and_evaluation(fit, capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "_REFRESH_SECONDS", 0.0)
    fit(callbacks=[RoundProgressBar(live=True)], enable_progress_bar=False, logger=False, max_rounds=2)
    states = capsys.readouterr().out.split("\r")
    assert any("Rounds 0/2" in state and "train=1/2" in state for state in states)
    assert any("Rounds 1/2" in state and "score=2/3" in state for state in states)
    assert any("Rounds 2/2" in state and "global test_acc=" in state for state in states)
    assert not any(state.startswith("round ") for state in states)


def test_the_bar_is_not_drawn_for_every_client_of_a_fast_round(fit, capsys):
    fit(callbacks=[RoundProgressBar(live=True)], enable_progress_bar=False, logger=False, max_rounds=2)
    assert capsys.readouterr().out.count("train=") + capsys.readouterr().out.count("score=") < 10


@pytest.mark.parametrize("verb", ["fit", "test", "profile", "export"])
def test_a_quiet_trainer_prints_nothing(verb, fit, capfd, caplog):
    if verb == "export":
        fit(quiet=True)
    level = logging.getLogger("lightning.pytorch").level
    fit(verb, quiet=True)
    captured = capfd.readouterr()
    assert (captured.out, captured.err, caplog.records) == ("", "", [])
    assert logging.getLogger("lightning.pytorch").level == level
    fit(verb)
    assert capfd.readouterr().out


def test_a_quiet_trainer_still_warns(fit, monkeypatch):
    monkeypatch.setattr(Classifier, "forward", lambda self, x: 1 / 0)
    with pytest.warns(UserWarning, match="FLOPs are not counted"):
        fit("profile", quiet=True)


TIME_LEFT = r"1/\d \w+  elapsed \d\d:\d\d  remaining \d\d:\d\d"
LINES = {
    "fit": [
        "survey: 0/3 clients",
        "train, round 1: 1/2 clients",
        "score, round 1: 3/3 clients",
        "fine-tune, round 1: 2/3",
        TIME_LEFT,
    ],
    "test": ["score, round 1: 0/3 clients", "score, round 1: 3/3 clients", TIME_LEFT],
    "export": ["check: 0/3 models", "check: 3/3 models", TIME_LEFT],
    "profile": ["survey: 3/3 clients", "simulate: 0/1 client-rounds"],
}


@pytest.mark.parametrize("verb", LINES)
def test_each_long_phase_shows_its_progress_and_the_time_left(verb, fit, capsys, monkeypatch):
    monkeypatch.setattr(phase_progress, "_LINE_SECONDS", 0.0)
    options = {"algorithm": SNIP(density=0.5), "finetune_epochs": 1, "max_rounds": 1, "logger": False}
    if verb in ("test", "export"):
        fit(**options)
        capsys.readouterr()
        options["ckpt_path"] = "last"
    fit(verb, asked={"check": True} if verb == "export" else {}, **options)
    err = capsys.readouterr().err
    assert all(re.search(line, err) for line in LINES[verb]), err


def test_a_replay_shows_the_rounds_before(fit, capsys, monkeypatch):
    monkeypatch.setattr(phase_progress, "_LINE_SECONDS", 0.0)
    with pytest.raises(InvalidOption, match="does not train in round 2"):  # known once rounds 0 and 1 are repeated
        fit("replay", logger=False, max_rounds=3, sampler=Oort(over_select=1.0), asked={"client": 99, "round": 2})
    assert "rounds before: 3/4 client-rounds" in capsys.readouterr().err


def test_a_bar_of_a_phase_is_removed_when_it_ends(capsys):
    phases = phase_progress.PhaseProgress(live=True)
    for done in range(3):
        phases.show("survey", done, 2)
    shown = capsys.readouterr().err.split("\r")
    assert any("survey 0/2 clients |" in state for state in shown)
    assert shown[-1].strip() == ""
    assert phases._bar is None
