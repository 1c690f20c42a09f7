"""``sparsefl fit --seeds``: a group of runs, each of which is the run of its seed."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from helpers.command_line import QUICKSTART, SHORT
from lightning_sparsefl.cli.seeds import SeedGroup, group_of
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.report.seeds import seed_rows

FIT = ["fit", "--config", QUICKSTART, *SHORT, "--trainer.logger=false", "--federation.local_engine=fast"]


def content(run):
    """What a run leaves, without its identifier and measured times."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {name: weight.numpy().tobytes() for name, weight in checkpoint["state_dict"].items()}
    header, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    timed = [[v for n, v in zip(header, row, strict=True) if not n.startswith("time/")] for row in rows]
    files = {name: (run / name).read_bytes() for name in ("clients.csv", "summary.json", "config.yaml")}
    return {"weights": weights, "metrics.csv": timed, **files}


def group_in(folder):
    (group,) = (folder / "runs" / "FedSpa").glob("group_*")
    return group


def test_a_stopped_group_goes_on_and_its_runs_are_those_of_their_seeds(sparsefl, tmp_path, monkeypatch, caplog):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers of signals are set in the main thread, and the tests run in another one")
    train, calls = Node._train, []

    def interrupted(self, *args):
        calls.append(self)
        if len(calls) == 11:  # in the second round of the second run
            os.kill(os.getpid(), signal.SIGINT)
        return train(self, *args)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Node, "_train", interrupted)
    try:
        code, _, err = sparsefl(*FIT, "--seeds", "0,1")
    finally:
        signal.signal(signal.SIGINT, former)
    assert code == 130
    group = group_in(tmp_path)
    assert err.endswith("sparsefl: interrupted.\n")
    assert "in round 2: 1 of 2 rounds are committed" in caplog.text
    assert f"1 of 2 runs are finished; the same command, or `--ckpt_path {group}`, goes on" in said(caplog, tmp_path)
    code, out, _ = sparsefl(*FIT, "--seeds", "0,1")
    assert code == 0
    assert len(calls) == 11 + 3
    assert "FedSpa after 2 rounds, 20 clients, 2 seeds" in out
    for again in (["fit", "--ckpt_path", group], [*FIT, "--seeds=0,1", "--ckpt_path=auto"]):
        code, out, _ = sparsefl(*again)
        assert code == 0
        assert len(calls) == 14
        table = out[out.index("2 seeds") :]
        assert table.split("global test_acc")[1].split()[:4] == rows_of(group)["global test_acc"]
    for seed in (0, 1):
        assert sparsefl(*FIT, f"--seed_everything={seed}")[0] == 0
        assert content(group / f"seed_{seed}") == content(tmp_path / "runs" / "FedSpa" / f"version_{seed}")


def test_further_seeds_join_the_group(sparsefl, tmp_path):
    assert sparsefl(*FIT, "--seeds", "0")[0] == 0
    code, out, _ = sparsefl(*FIT, "--seeds", "2,1")
    assert code == 0
    assert json.loads((group_in(tmp_path) / "seeds.json").read_text()) == [0, 2, 1]
    assert "FedSpa after 2 rounds, 20 clients, 3 seeds" in out


def test_a_further_seed_with_another_option_is_refused(sparsefl, tmp_path):
    assert sparsefl(*FIT, "--seeds", "0")[0] == 0
    group = group_in(tmp_path)
    before = (group / "config.yaml").read_text()
    code, _, err = sparsefl("fit", "--ckpt_path", str(group), "--seeds", "1", "--algorithm.density=0.1")
    assert code == 2
    assert (
        "is a group of runs with `algorithm.density: 0.5`, and seed 1 would begin with `algorithm.density: 0.1`" in err
    )
    assert (group / "config.yaml").read_text() == before
    assert json.loads((group / "seeds.json").read_text()) == [0]


def test_an_option_that_the_runs_refuse_does_not_stay_in_the_group(sparsefl, tmp_path):
    assert sparsefl(*FIT, "--seeds", "0")[0] == 0
    group = group_in(tmp_path)
    code, _, err = sparsefl("fit", "--ckpt_path", str(group), "--algorithm.density=0.1")
    assert code == 2
    assert "`algorithm.density` was 0.5, and is 0.1 now" in err
    code, out, _ = sparsefl("fit", "--ckpt_path", str(group), "--trainer.max_rounds=3")
    assert code == 0
    assert "FedSpa after 3 rounds, 20 clients, 1 seed\n" in out
    assert "max_rounds: 3" in (group / "config.yaml").read_text()


def test_seeds_of_a_command_that_runs_beside_this_one_are_kept(tmp_path):
    ours, theirs = (SeedGroup(tmp_path, [seed], "algorithm: {}\n") for seed in (0, 1))
    ours.run_dir(0).mkdir()
    theirs.write()
    ours.write()
    theirs.run_dir(1).mkdir()
    assert ours.all_seeds == [0, 1]
    ours.write()
    assert json.loads((tmp_path / "seeds.json").read_text()) == [0, 1]


def test_finished_runs_of_a_group_are_not_advised_to_go_on(sparsefl, tmp_path, caplog):
    assert sparsefl(*FIT, "--seeds", "0")[0] == 0
    assert "is finished" not in caplog.text
    caplog.clear()
    assert sparsefl(*FIT, "--seeds", "0,1")[0] == 0
    group = group_in(tmp_path)
    text = said(caplog, tmp_path)
    assert f"Seed 0 of 0, 1 is finished: {group / 'seed_0'}" in text
    assert f"Seed 1 of 0, 1: {group / 'seed_1'}" in text
    assert "raise it to train longer" not in text


def test_runs_of_a_group_that_a_callback_ended_are_finished(sparsefl, tmp_path, caplog, monkeypatch):
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=clients/trained")
    fit = [
        *FIT,
        *stop,
        "--trainer.callbacks.patience=1",
        "--trainer.max_rounds=4",
        "--trainer.check_val_every_n_round=1",
        "--seeds=0,1",
    ]
    code, out, _ = sparsefl(*fit)
    assert code == 0
    table = out[out.index("FedSpa after 2 rounds, 20 clients, 2 seeds") :]
    caplog.clear()
    monkeypatch.setattr(Node, "_train", None)
    code, out, _ = sparsefl(*fit)
    assert code == 0
    assert out.endswith(table)
    for seed in (0, 1):
        assert f"Seed {seed} of 0, 1 is finished: {group_in(tmp_path) / f'seed_{seed}'}" in said(caplog, tmp_path)
    assert "leave it out" not in caplog.text


@pytest.mark.parametrize("content", ["[0", "[-1]", "{}"])
def test_a_damaged_list_of_seeds_is_refused_or_replaced(content, tmp_path):
    (tmp_path / "seeds.json").write_text(content)
    with pytest.raises(InvalidOption, match=r"seeds\.json is damaged .*; set `seeds`\.$"):
        group_of(None, str(tmp_path), tmp_path, "FedAvg", "")
    group = group_of("1,2", str(tmp_path), tmp_path, "FedAvg", "")
    assert group.all_seeds == [1, 2]


def said(caplog, folder):
    return caplog.text.replace("runs/", f"{folder}/runs/")


def rows_of(group):
    summaries = [json.loads((group / f"seed_{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    return {row[0]: list(row[1:]) for row in seed_rows(summaries)}


def test_mean_and_standard_deviation_over_seeds():
    rows = seed_rows([{"seed": s, "global/acc": 0.1 * s, "comm/uplink_bytes_total": 10} for s in (1, 2, 4)])
    assert rows[0] == ("global acc", "0.2333", "0.1528", "0.1000", "0.2000", "0.4000")
    assert rows[1] == ("bytes up", "10 B", "0 B", "10 B", "10 B", "10 B")
    assert seed_rows([{"global/acc": 0.5}]) == [("global acc", "0.5000", "", "0.5000")]
    assert seed_rows([{"global/acc": 0.5}, {"global/f1": 0.5}]) == []


@pytest.mark.parametrize("diverged", ["nan", "inf"])
def test_a_diverged_run_is_told_and_not_left_out(diverged):
    (row,) = seed_rows([{"global/loss": float(diverged)}, {"global/loss": 1.0}])
    assert row == ("global loss", diverged, "nan", diverged, "1.0000")


def test_the_title_has_the_rounds_of_all_runs(tmp_path, capsys):
    for seed, rounds in enumerate((5, 3)):
        (tmp_path / f"seed_{seed}").mkdir()
        summary = {"algorithm": "FedAvg", "rounds": rounds, "clients": 4, "seed": seed, "global/acc": 0.5}
        (tmp_path / f"seed_{seed}" / "summary.json").write_text(json.dumps(summary))
    SeedGroup(tmp_path, [0, 1], "").print()
    assert "FedAvg after 3 to 5 rounds, 4 clients, 2 seeds" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", ["a", "0,0", "-1", "1.5", "", "0,,1", "0,4294967296"])
def test_bad_seeds_are_one_sentence(seeds, sparsefl, tmp_path):
    code, _, err = sparsefl(*FIT, f"--seeds={seeds}")
    assert code == 2
    text = f"`seeds` is {seeds!r}; expected different whole numbers from 0 to 4294967295, such as 0,1,2."
    assert [line for line in err.splitlines() if line.startswith("sparsefl: ")] == [f"sparsefl: error: {text}"]
    assert not (tmp_path / "runs").exists()


def test_a_group_does_not_start_from_a_checkpoint(sparsefl):
    code, _, err = sparsefl(*FIT, "--seeds=0", "--ckpt_path=last")
    assert code == 2
    assert "`ckpt_path` is 'last'; with `seeds`, expected the folder of a group of runs, or none" in err


@pytest.mark.slow
def test_a_group_of_two_ranks_equals_that_of_one(sparsefl, tmp_path):
    assert sparsefl(*FIT, "--seeds=0,1")[0] == 0
    there = tmp_path / "two"
    there.mkdir()
    command = [sys.executable, "-m", "lightning_sparsefl", *FIT, "--seeds=0,1", "--trainer.devices=2"]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        one, two = (content(group_in(folder) / f"seed_{seed}") for folder in (tmp_path, there))
        assert one["weights"] == two["weights"]
        assert one["clients.csv"] == two["clients.csv"]
