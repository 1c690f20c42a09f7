"""Methods of partial sharing under options of the federation that act on what is merged and scored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl import FedBABU, FedBN, FedP3, FedPer, FedRep, FedSelect, HeteroFL, LGFedAvg
from lightning_sparsefl.federated import CoverageMedian
from lightning_sparsefl.testing.networks import Classifier

METHODS = [
    FedPer(),
    FedPer(own=("head", "norm")),
    FedRep(head_epochs=1),
    LGFedAvg(layers_shared=1),
    FedBN(),
    FedP3(owned=1),
    FedSelect(every=1, alternations=1),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


@pytest.mark.slow_after_first
@every_method
def test_new_clients_are_scored_and_a_median_may_merge(method, federation):
    options = {"unseen_clients": 1, "reducer": CoverageMedian(), "finetune_epochs": 1, "eval_after_training": True}
    summary = federation(method, rounds=2, max_epochs=1, federation=options).summary
    scores = [f"{kind}/val_acc" for kind in ("global", "personal", "personal_after", "unseen", "finetuned")]
    assert all(0 <= summary[name] <= 1 for name in scores)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("method", [method for method in METHODS if not isinstance(method, FedP3)], ids=repr)
def test_a_profile_charges_what_a_run_is_charged(method, federation):
    """Up to the clients' metrics, which a profile lacks; of FedP3 it knows only the layers of the first client."""
    wire = federation(method, verb="profile").summary.content["run"]["wire"]
    summary = federation(method).summary
    assert wire["downlink_bytes"] == summary["comm/downlink_bytes_total"]
    assert 0 < summary["comm/uplink_bytes_total"] - wire["uplink_bytes"] < 12 * 70


class EmbeddingLast(Classifier):
    """A classifier whose embedding was created after its head."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(2, 8)

    def forward(self, x):
        return super().forward(x + self.vectors((x.flatten(1)[:, 0] > 0).long()).view_as(x))


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("method", "part"),
    [(FedP3(owned=1, local_pruning="uniform"), "head"), (FedPer(), "own"), (FedBABU(), "trainable")],
    ids=repr,
)
def test_an_embedding_that_was_created_last_is_not_the_head(method, part, federation):
    for verb, folder in (("profile", "profile"), ("fit", "fit")):
        trainer = federation(method, module=EmbeddingLast(), rounds=1, max_epochs=1, verb=verb, folder=folder)
    state = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["sparsefl"]["state"]
    assert set(state["extra"][part]) == {"net.4.weight", "net.4.bias"}


def test_the_rows_of_a_label_mask_are_not_those_of_an_embedding(federation):
    trainer = federation(HeteroFL(rates=(1.0,), label_mask=True), module=EmbeddingLast(), rounds=1, max_epochs=1)
    assert 0 <= trainer.summary["global/val_acc"] <= 1
