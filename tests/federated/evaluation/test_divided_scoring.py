"""The global model is scored by all ranks together, with the bits of one process."""

import csv

import pytest
import torch

from lightning_sparsefl import FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.models import MLP


class Hooked(MLP):
    """A module that has to see all batches in one process."""

    def on_validation_epoch_end(self):
        self.log("val_twice", 2 * self.trainer.callback_metrics["val_loss"])


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """Return a function that trains with some ranks, and returns global scores and who has scored the pooled set."""

    def fit(devices, module=MLP, federation=None):
        folder = tmp_path / f"{module.__name__}-{devices}"
        folder.mkdir()
        for name in ("score", "score_part"):
            monkeypatch.setattr(ClientWorker, name, noted(getattr(REAL, name), folder / "calls.txt"))
        trainer = FederatedTrainer(
            algorithm=FedSpa(),
            federation=Federation(clients_per_round=3, pictures_every_n_rounds=0, **(federation or {})),
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=2,
            default_root_dir=str(folder),
            logger=False,
            enable_progress_bar=False,
            seed=0,
        )
        torch.manual_seed(0)
        data = FederatedBlobs(num_clients=6, num_classes=4, dim=8, val_fraction=0.3, batch_size=16, eval_batch_size=16)
        trainer.fit(module(num_classes=4, sample_shape=(1, 1, 8)), data)
        with (trainer.run_folder / "metrics.csv").open() as file:
            rows = [{k: v for k, v in row.items() if k.startswith("global/")} for row in csv.DictReader(file)]
        return rows, (folder / "calls.txt").read_text().splitlines()

    return fit


class REAL:
    score, score_part = ClientWorker.score, ClientWorker.score_part


def noted(function, path):
    def call(self, weights, loader, split, key, *part):
        if key[-1] == "evaluate global":
            with path.open("a") as file:
                file.write(f"{function.__name__} {key[1]} {part}\n")
        return function(self, weights, loader, split, key, *part)

    return call


def test_any_number_of_ranks_writes_the_scores_of_one(scores):
    alone, calls = scores(1)
    assert calls == ["score 1 ()", "score 2 ()"]
    assert set(alone[0]) == {"global/val_loss", "global/val_acc"}
    for devices in (2, 3):
        together, calls = scores(devices)
        assert together == alone
        assert sorted(calls) == [f"score_part {r} (({k}, {devices}),)" for r in (1, 2) for k in range(devices)]


def test_a_module_that_cannot_be_divided_is_scored_by_one_process_from_then_on(scores):
    alone, _ = scores(1, Hooked)
    together, calls = scores(2, Hooked)
    assert together == alone
    assert "global/val_twice" in alone[0]
    assert sorted(calls) == ["score 1 ()", "score 2 ()", "score_part 1 ((0, 2),)", "score_part 1 ((1, 2),)"]


def test_a_best_round_and_fine_tuning_divide_their_scores_too(scores):
    options = {"select": "global/val_loss", "finetune_epochs": 1}
    assert scores(2, federation=options)[0] == scores(1, federation=options)[0]
