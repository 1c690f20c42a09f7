"""Methods of partial sharing under options of the federation that act on what is merged and scored."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FedBN, FedP3, FedPer, FedRep, FedSelect, LGFedAvg
from lightning_sparsefl.federated import CoverageMedian

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
