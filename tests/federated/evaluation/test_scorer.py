"""Whom a run scores, which round it fine-tunes from, and what its tables say of it."""

import csv
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from helpers.device import on_several_ranks
from lightning_sparsefl import (
    DisPFL,
    FedAvg,
    FedBABU,
    FedDIP,
    FederatedAlgorithm,
    FederatedTrainer,
    Federation,
    FedSpa,
    Local,
    SpaFL,
)
from lightning_sparsefl.data import FederatedBlobs, FederatedDataset
from lightning_sparsefl.errors import EvaluationFailed, InvalidOption
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.evaluation.scores import Scores
from lightning_sparsefl.federated.sampling.draws import split_unseen
from lightning_sparsefl.federated.storage.checkpoint import SelectedRound
from lightning_sparsefl.models import MLP
from lightning_sparsefl.report import Report, load_runs
from lightning_sparsefl.types import PendingUpdate, RunState, ServerState


class Tuned(FederatedAlgorithm):
    """FedAvg with a last local fit of two epochs."""

    calls: list = []  # noqa: RUF012 - a note of the test

    def download_for(self, server, view, task):
        return replace(self.download(server, view), extra={"state": {"round": torch.tensor([float(server.round)])}})

    def finetune(self, message, client):
        self.calls.append((int(message.extra["state"]["round"]), client.id, client.round))
        return client.fit(message.weights, epochs=2).weights


@pytest.fixture
def fit(tmp_path):
    def run(algorithm=None, *, federation=None, ckpt_path=None, data=None, model=None, **options):
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_rounds": 3,
            "default_root_dir": str(tmp_path),
            "logger": False,
            "enable_progress_bar": False,
            "seed": 0,
            "federation": Federation(clients_per_round=3, pictures_every_n_rounds=0, **(federation or {})),
        }
        trainer = FederatedTrainer(algorithm=algorithm or FedAvg(), **{**settings, **options})
        torch.manual_seed(0)
        sets = {"num_clients": 6, "num_classes": 4, "dim": 8, "val_fraction": 0.2, "batch_size": 16, **(data or {})}
        model = model or MLP(num_classes=4, sample_shape=(1, 1, 8))
        summary = trainer.fit(model, FederatedBlobs(**sets), ckpt_path)
        return trainer.run_folder, summary

    return run


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_unseen_clients_never_train_and_are_scored_apart(fit):
    folder, summary = fit(FedSpa(), federation={"unseen_clients": 2}, max_rounds=4)
    training, unseen = split_unseen(0, 6, 2)
    table = rows(folder / "clients.csv")
    assert {int(row["client"]) for row in table if row["trained"] == "1"} <= set(training)
    last = [row for row in table if row["round"] == "3"]
    assert {int(row["client"]) for row in last if row["unseen/val_acc"]} == set(unseen)
    assert {int(row["client"]) for row in last if row["personal/val_acc"]} == set(training)
    gap = summary["personal/val_acc"] - summary["unseen/val_acc"]
    assert summary["unseen/val_acc_gap"] == pytest.approx(gap)
    mean = sum(float(row["unseen/val_acc"]) for row in last if row["unseen/val_acc"]) / 2
    assert summary["unseen/val_acc"] == pytest.approx(mean)


@pytest.mark.parametrize("algorithm", [DisPFL(), Local(), SpaFL()], ids=lambda algorithm: type(algorithm).__name__)
def test_a_method_without_a_global_model_scores_its_clients_alone(fit, algorithm):
    folder, summary = fit(algorithm, federation={"select": "personal/val_loss", "finetune_epochs": 1})
    table = rows(folder / "metrics.csv")
    assert not any(name.startswith("global/") for name in [*summary, *table[0]])
    assert all(float(row["personal/val_loss"]) > 0 for row in table)
    assert summary["selected/val_loss"] == min(float(row["personal/val_loss"]) for row in table)
    assert summary["finetuned/val_loss"] > 0


def test_a_round_cannot_be_selected_by_a_global_model_that_is_not_trained(fit):
    sentence = r"`federation.select` is 'global/val_acc', but Local trains no global model; .* as 'personal/val_acc'\.$"
    with pytest.raises(InvalidOption, match=sentence):
        fit(Local(), federation={"select": "global/val_acc"})


def test_too_many_unseen_clients_are_refused(fit):
    with pytest.raises(InvalidOption, match=r"has 6 clients, 4 of them unseen; lower it to 2 or less\.$"):
        fit(federation={"unseen_clients": 4})
    for unseen in (6, 7):
        expected = rf"`federation\.unseen_clients` is {unseen}; expected at most 5, so that one of the data's 6 clients"
        with pytest.raises(InvalidOption, match=expected):
            fit(federation={"unseen_clients": unseen})
    with pytest.raises(InvalidOption, match=r"`federation\.unseen_clients` is -1"):
        Federation(unseen_clients=-1)


@pytest.mark.parametrize("algorithm", [FedAvg(), Local(), FedSpa()])
def test_participants_are_scored_after_their_training(fit, algorithm):
    folder, summary = fit(algorithm, federation={"eval_after_training": True}, check_val_every_n_round=2, max_epochs=3)
    table = rows(folder / "clients.csv")
    scored = {int(row["round"]) for row in table if row["personal_after/val_acc"]}
    assert scored == {1, 2}  # the evaluated rounds
    last = [row for row in table if row["round"] == "2"]
    assert all(bool(row["personal_after/val_acc"]) == (row["trained"] == "1") for row in last)
    after = [float(row["personal_after/val_loss"]) for row in last if row["trained"] == "1"]
    assert summary["personal_after/val_loss"] == pytest.approx(sum(after) / len(after))
    before = {int(row["client"]): float(row["personal/val_loss"]) for row in table if row["round"] == "1"}
    trained = [int(row["client"]) for row in last if row["trained"] == "1"]
    assert sum(after) < sum(before[client] for client in trained)  # three epochs on the client's own data


def test_a_local_client_is_the_same_model_after_training_and_in_the_next_score(fit):
    folder, _ = fit(Local(), federation={"eval_after_training": True})
    last = [row for row in rows(folder / "clients.csv") if row["round"] == "2" and row["trained"] == "1"]
    assert [row["personal_after/val_loss"] for row in last] == [row["personal/val_loss"] for row in last]


def test_the_best_round_is_fine_tuned_at_its_own_round(fit):
    Tuned.calls.clear()
    folder, summary = fit(Tuned(), federation={"select": "global/val_loss", "unseen_clients": 1}, max_rounds=5)
    losses = [float(row["global/val_loss"]) for row in rows(folder / "metrics.csv")]
    best = losses.index(min(losses)) + 1
    assert summary["selected/round"] == best
    assert sorted(Tuned.calls) == [(best, client, best - 1) for client in range(6)]
    tuned = rows(folder / "finetuned.csv")
    assert [int(row["client"]) for row in tuned] == list(range(6))
    seen = [row for row in tuned if row["unseen"] == "0"]
    assert summary["finetuned/val_loss"] == pytest.approx(sum(float(r["finetuned/val_loss"]) for r in seen) / 5)
    assert summary["selected/val_loss"] == pytest.approx(sum(float(r["selected/val_loss"]) for r in seen) / 5)
    assert summary["finetuned_unseen/val_loss"] != summary["selected_unseen/val_loss"]
    assert json.loads((folder / "summary.json").read_text())["selected/round"] == best


def test_the_smallest_spread_over_clients_is_selected(fit):
    folder, summary = fit(federation={"select": "personal/val_loss_std", "finetune_epochs": 1}, max_rounds=4)
    spreads = [float(row["personal/val_loss_std"]) for row in rows(folder / "metrics.csv")]
    assert summary["selected/round"] == spreads.index(min(spreads)) + 1 != spreads.index(max(spreads)) + 1
    _, summary = fit(federation={"select": "personal/val_acc_std", "finetune_epochs": 1}, max_rounds=4)
    spreads = [float(row["personal/val_acc_std"]) for row in rows(folder / "metrics.csv")]
    assert summary["selected/round"] == spreads.index(min(spreads)) + 1 != spreads.index(max(spreads)) + 1


class FailsInTests(MLP):
    def test_step(self, batch, batch_idx):
        raise KeyError("boxes")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=on_several_ranks)])
def test_an_error_in_the_evaluation_of_the_global_model_is_named(ranks, fit, tmp_path):
    model = FailsInTests(num_classes=4, sample_shape=(1, 1, 8))
    several = {"strategy": "client_parallel_fork"} if ranks > 1 else {}
    words = "of the global model on the test data failed: KeyError: 'boxes'; correct `FailsInTests.test_step`"
    with pytest.raises(EvaluationFailed, match=re.escape(words)) as raised:
        fit(model=model, data={"eval_split": "test"}, devices=ranks, **several)
    assert ranks > 1 or isinstance(raised.value.__cause__, KeyError)


class StopsEarly(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch == 2


def test_the_last_round_can_be_selected_where_a_callback_stops_the_run_between_evaluations(fit):
    stopped = {"max_rounds": 9, "check_val_every_n_round": 2, "callbacks": [StopsEarly()]}
    _, summary = fit(federation={"select": "global/val_loss"}, **stopped)
    assert summary["rounds"] == 3
    assert summary["selected/round"] == 3  # the loss falls


def test_a_method_without_fine_tuning_gets_it_from_the_federation(fit):
    folder, summary = fit(FedAvg(), federation={"finetune_epochs": 3})
    assert len(rows(folder / "finetuned.csv")) == 6
    assert summary["selected/val_loss"] == summary["personal/val_loss"]
    assert summary["finetuned/val_loss"] < summary["selected/val_loss"]
    _, longer = fit(FedAvg(), federation={"finetune_epochs": 6})
    assert longer["finetuned/val_loss"] != summary["finetuned/val_loss"]


def test_the_best_round_survives_a_stop_and_a_resume(fit):
    options = {"federation": {"select": "global/val_loss"}}
    _, straight = fit(Tuned(), max_rounds=4, **options)
    folder, _ = fit(Tuned(), max_rounds=2, **options)
    _, resumed = fit(Tuned(), max_rounds=4, ckpt_path=str(folder / "checkpoints" / "last.ckpt"), **options)
    assert resumed == straight


def test_a_round_is_selected_by_validation_where_test_sets_are_scored(fit):
    folder, summary = fit(Tuned(), federation={"select": "global/val_acc"}, data={"eval_split": "test"})
    table = rows(folder / "metrics.csv")
    best = max(range(3), key=lambda i: float(table[i]["global/val_acc"]))
    assert summary["selected/round"] == best + 1
    assert "finetuned/test_acc" in summary
    assert "finetuned/val_acc" not in summary
    assert "personal/val_acc" not in table[0]


def test_an_unknown_key_to_select_by_is_refused_by_name(fit):
    with pytest.raises(InvalidOption, match=r"select` is 'global/accuracy'; expected a validation score: \['gl"):
        fit(Tuned(), federation={"select": "global/accuracy"})


def test_a_score_that_is_no_number_is_never_the_best(fit):
    class Poisoned(FederatedAlgorithm):
        def aggregate(self, server, merged):
            state = super().aggregate(server, merged)
            if server.round == 0:
                return state
            return replace(state, weights={name: w * 1e25 for name, w in state.weights.items()})  # the loss overflows

        def finetune(self, message, client):
            return message.weights

    _, summary = fit(Poisoned(), federation={"select": "global/val_loss"}, max_rounds=2)
    assert summary["selected/round"] == 1


def test_test_scores_select_nothing(fit):
    with pytest.raises(InvalidOption, match=r"is 'global/test_acc'; expected a validation score: \['global/val_acc'"):
        fit(Tuned(), federation={"select": "global/test_acc"}, data={"eval_split": "test"})


@pytest.mark.filterwarnings("ignore:.*was written with `federation.select`")
def test_a_selection_by_another_key_starts_anew(fit):
    folder, _ = fit(Tuned(), max_rounds=2, federation={"select": "global/val_loss"})
    path = str(folder / "checkpoints" / "last.ckpt")
    folder, summary = fit(Tuned(), max_rounds=4, federation={"select": "global/val_acc"}, ckpt_path=path)
    accuracies = [float(row["global/val_acc"]) for row in rows(folder / "metrics.csv")][2:]
    assert summary["selected/round"] == 3 + accuracies.index(max(accuracies))


def scorer(pins):
    federation, server = Federation(select="global/val_acc"), SimpleNamespace(algorithm=FedAvg())
    coordinator = SimpleNamespace(server=server, federation=federation)
    return Scorer(coordinator, None, (), [SimpleNamespace(pin=pins.append)], "val")


def test_a_selected_round_is_restored_if_it_has_the_same_key():
    pins, state = [], RunState(ServerState(2, {}))
    one = scorer(pins)
    one.restore(SelectedRound("global/val_loss", 0.1, state))
    assert (one.selected, pins) == (None, [])
    one.restore(SelectedRound("global/val_acc", 0.9, state))
    assert (one.selected.state, pins) == (state, [2])


def test_a_selected_round_is_stored_without_pending_updates():
    late = PendingUpdate(client=0, round=1, arrival=2.0, weight=1, num_examples=1, changes={})
    one = scorer(pins := [])
    one.select(RunState(ServerState(4, {}), pending=(late,)), Scores({"val_acc": 0.5}, {}))
    assert (one.selected.value, one.selected.state.pending, pins) == (0.5, (), [4])


@pytest.mark.slow_after_first
@pytest.mark.parametrize("resume", [False, True])
def test_the_selected_round_is_scored_with_what_was_kept_of_the_clients_then(fit, resume):
    select = {"select": "personal/val_loss", "eval_clients": "all"}
    if resume:
        folder, _ = fit(FedSpa(density=0.3), max_rounds=3, federation=select)
        path = str(folder / "checkpoints" / "last.ckpt")
        folder, summary = fit(FedSpa(density=0.3), max_rounds=6, federation=select, ckpt_path=path)
    else:
        folder, summary = fit(FedSpa(density=0.3), max_rounds=6, federation=select)
    losses = [float(row["personal/val_loss"]) for row in rows(folder / "metrics.csv")]
    assert summary["selected/round"] == 1 + losses.index(min(losses))
    assert summary["selected/val_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_sparse_model_is_fine_tuned_as_sparse_as_it_is(fit, monkeypatch):
    densities = []
    score = Client.evaluate

    def watch(client, weights, split="val"):
        sizes = {name: w for name, w in weights.items() if w.ndim > 1}
        densities.append(sum(int((w != 0).sum()) for w in sizes.values()) / sum(w.numel() for w in sizes.values()))
        return score(client, weights, split)

    monkeypatch.setattr(Client, "evaluate", watch)
    fit(FedSpa(density=0.3), federation={"finetune_epochs": 1}, max_rounds=2)
    assert max(densities) <= 0.3


def test_a_method_that_need_not_fine_tune_gets_it_from_the_federation(fit):
    _, summary = fit(FedBABU(finetune_epochs=0), federation={"finetune_epochs": 1})
    assert summary["finetuned/val_loss"] != summary["selected/val_loss"]


@pytest.mark.parametrize("algorithm", [FedDIP(reconfigure_every=1)])
def test_a_plan_for_a_number_of_rounds_is_not_continued_with_another(fit, algorithm):
    folder, _ = fit(algorithm, max_rounds=2)
    with pytest.raises(ValueError, match=r"`trainer\.max_rounds` was 2, and is 4 now"):
        fit(algorithm, max_rounds=4, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))


class Silent(MLP):
    def validation_step(self, batch, batch_idx):
        self(batch[0])


@pytest.mark.filterwarnings("default")
def test_a_step_that_logs_nothing_is_named_once(fit, recwarn):
    """Also without a score there is a table, of costs alone."""
    fit(model=Silent(num_classes=4, sample_shape=(1, 1, 8)))
    said = [str(each.message) for each in recwarn if "logs nothing" in str(each.message)]
    assert said == [
        "`Silent.validation_step` logs nothing, so that this run has no scores; expected calls of `self.log` (option "
        "`model`)."
    ]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_limit_of_no_batches_is_named_instead_of_the_step(split, fit, recwarn):
    fit(data={"eval_split": split}, max_rounds=1, **{f"limit_{split}_batches": 0})
    said = [str(each.message) for each in recwarn if "has no scores" in str(each.message)]
    option = f"trainer.limit_{split}_batches"
    assert said == [f"`{option}` is 0, so that this run has no scores; expected a number above 0 to have them."]


class WithoutTests(FederatedDataset):
    def client_test_dataloader(self, client):
        return DataLoader([], batch_size=1)


@pytest.mark.filterwarnings("default")
def test_clients_without_data_of_a_method_without_a_global_model_are_named_instead_of_the_step(tmp_path, recwarn):
    blobs = TensorDataset(torch.randn(40, 1, 1, 8), torch.arange(40) % 4)
    data = WithoutTests(blobs, blobs, num_clients=4, eval_split="test")
    options = {"max_rounds": 1, "default_root_dir": str(tmp_path), "logger": False, "accelerator": "cpu"}
    options["federation"] = Federation(clients_per_round=2)
    FederatedTrainer(algorithm=Local(), **options).fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), data)
    said = [str(each.message) for each in recwarn if "has no scores" in str(each.message)]
    assert said == [
        "No client has test data, and Local has no global model, so that this run has no scores; expected samples of "
        "some client to have them (option `data`)."
    ]


class Logging(MLP):
    """Logs numbers under the given names in validation."""

    def __init__(self, *names):
        super().__init__(num_classes=4, sample_shape=(1, 1, 8))
        self.names = names

    def validation_step(self, batch, batch_idx):
        for name in self.names:
            self.log(name, self(batch[0]).mean())


@pytest.mark.parametrize(
    ("name", "meaning", "unseen"),
    [
        ("acc_std", "std over clients", 0),
        ("acc_worst10", "worst tenth", 0),
        ("acc_gap", "participants minus unseen", 2),
    ],
)
def test_a_metric_with_the_name_of_a_statistic_of_another_is_refused(fit, name, meaning, unseen):
    said = (
        f"`model` logs '{name}' beside 'acc', but that is the key of a statistic of 'acc' ({meaning}); expected "
        "another name of the logged metric in the module."
    )
    with pytest.raises(InvalidOption, match=f"^{re.escape(said)}$"):
        fit(model=Logging("acc", name), federation={"unseen_clients": unseen}, max_rounds=1)


def test_a_metric_that_only_looks_like_a_statistic_is_scored_and_shown(fit, capsys):
    folder, summary = fit(model=Logging("acc_std", "loss", "loss_gap"), max_rounds=1, enable_progress_bar=True)
    out = capsys.readouterr().out
    assert re.search(r"round 1/1  global acc_std -?\d\.\d{3}  personal ", out)
    for name in ("acc_std", "loss_gap"):
        assert f"personal {name} " in out
        assert summary[f"personal/{name}_std"] > 0
    report = Report(load_runs([folder]))
    assert report.metric == "acc_std"
    assert report.summary.runs["FedAvg"][0]["personal_acc_std"] == pytest.approx(summary["personal/acc_std"])
