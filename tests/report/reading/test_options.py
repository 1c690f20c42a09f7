"""Options from the configuration of a run."""

from dataclasses import fields
from inspect import signature

import pytest

from helpers.run_folders import write_run
from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedDataModule, FederatedMNIST
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import load_runs
from lightning_sparsefl.report.reading.options import WITHOUT_EFFECT, read_options, with_effect

CONFIG = """
seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 2, callbacks: [{class_path: EarlyStopping, init_args: {monitor: a}}]}
algorithm: {class_path: lightning_sparsefl.FedSpa, init_args: {density: 0.5, none: null}}
federation: {capacities: [0.5, 1.0], store: disk}
model: {class_path: mine.Net, init_args: {lr: 1.0e-05}}
data: {class_path: lightning_sparsefl.data.FederatedDigits, init_args: {partition: {class_path: a.b.IID}, root: x}}
ckpt_path: last
"""


def test_options_are_flat_and_classes_are_their_names(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert with_effect(read_options(tmp_path / "config.yaml")) == {
        "seed_everything": 3,
        "trainer.max_epochs": 2,
        "trainer.callbacks.0": "EarlyStopping",
        "trainer.callbacks.0.monitor": "a",
        "algorithm": "FedSpa",
        "algorithm.density": 0.5,
        "federation.capacities": "[0.5, 1.0]",
        "model": "mine.Net",
        "model.lr": 1e-5,
        "data": "FederatedDigits",
        "data.partition": "a.b.IID",
    }


def test_options_without_effect_exist():
    assert set(WITHOUT_EFFECT["federation"]) <= {field.name for field in fields(Federation)}
    assert set(WITHOUT_EFFECT["trainer"]) <= set(signature(FederatedTrainer).parameters)
    options = {name for kind in (FederatedDataModule, FederatedMNIST) for name in signature(kind).parameters}
    assert set(WITHOUT_EFFECT["data"]) <= options


def test_evaluations_that_change_scores_or_costs_to_a_target_have_an_effect():
    names = ("check_val_every_n_round", "limit_val_batches", "limit_test_batches", "validate_locally")
    options = {f"trainer.{name}": 2 for name in names}
    options |= {f"federation.{name}": 2 for name in ("eval_clients", "finetune_epochs", "select", "unseen_clients")}
    assert with_effect({**options, "federation.eval_after_training": True}) == options


def test_hyperparameters_have_the_same_names(tmp_path):
    (tmp_path / "hparams.yaml").write_text("algorithm: FedSpa\nalgorithm/density: 0.5\ntrainer/seed: 3\n")
    expected = {"algorithm": "FedSpa", "algorithm.density": 0.5, "trainer.seed": 3}
    assert read_options(tmp_path / "hparams.yaml") == expected


def test_all_runs_are_read_from_the_same_kind_of_file(tmp_path):
    both = write_run(tmp_path / "both")
    other = write_run(tmp_path / "other", seed=1)
    for folder in (both, other):
        (folder / "hparams.yaml").write_text("algorithm: FedSpa\nalgorithm/density: 0.5\n")
    (other / "config.yaml").unlink()
    assert [dict(run.options) for run in load_runs([both, other])] == [
        {"algorithm": "FedSpa", "algorithm.density": 0.5}
    ] * 2
    assert "federation.clients_per_round" in load_runs([both])[0].options


def test_runs_of_unknown_options_are_not_taken_for_seeds(tmp_path):
    folders = [write_run(tmp_path / "FedAvg" / f"version_{n}", "FedAvg", seed=n, finished=n == 0) for n in range(2)]
    for folder in folders:
        (folder / "config.yaml").unlink()
    first, second = load_runs(folders)
    assert first.method == second.method == "FedAvg"  # of the summary, and of the folder
    assert first.options != second.options


@pytest.mark.parametrize("first", ["{x: 1}", "{x: null}", "{}"])
@pytest.mark.parametrize("pair", ["{{p: *{0}, q: *{0}}}", "[*{0}, *{0}]"])
def test_repeated_references_do_not_exhaust_memory(first, pair, tmp_path):
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} {pair.format(f'a{n - 1}')}" for n in range(1, 40)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(InvalidOption, match="more than 10000 options"):
        read_options(tmp_path / "config.yaml")


def test_repeated_lists_do_not_exhaust_memory(tmp_path):
    lines = ["a0: &a0 [1, 2]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(InvalidOption, match="more than 10000 options"):
        read_options(tmp_path / "config.yaml")
