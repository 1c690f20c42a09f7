"""A round's logged keys, by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from lightning_sparsefl import FederatedAlgorithm
from lightning_sparsefl.cost import Charge
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.rounds.round_metrics import late_metrics, round_metrics
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.testing.small_federation import SmallFederation

LAYOUT = Layout({"a": torch.zeros(10), "b": torch.zeros(30)}, {})


def test_metrics_are_weighted_by_the_samples_of_the_clients_that_have_them():
    outcomes = [
        Outcome(0, num_examples=10, metrics={"loss": 1.0, "norm": 4.0}),
        Outcome(1, num_examples=30, metrics={"loss": 2.0}),
        Outcome(2, "failed", num_examples=60, metrics={"loss": 9.0}),
        Outcome(3, "late", num_examples=60, metrics={"loss": 9.0}),
    ]
    keys = round_metrics(outcomes, LAYOUT)
    assert keys["local/loss"] == pytest.approx((10 * 1 + 30 * 2) / 40)
    assert keys["local/norm"] == 4.0
    assert (keys["clients/trained"], keys["clients/failed"]) == (2, 1)


def test_a_layer_without_a_mask_is_dense():
    outcomes = [Outcome(0, densities={"a": 0.5, "b": 0.1}), Outcome(1, densities={"b": 0.3}), Outcome(2)]
    keys = round_metrics(outcomes, LAYOUT)
    assert keys["density/layer/a"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert keys["density/layer/b"] == pytest.approx((0.1 + 0.3 + 1) / 3)
    assert keys["density/all"] == pytest.approx(((5 + 3) / 40 + 0.3 + 1) / 3)


def test_changes_of_masks_are_averaged_and_times_are_those_of_the_slowest():
    outcomes = [
        Outcome(0, changed=0.1, simulated_seconds=2.0),
        Outcome(1, changed=0.4, simulated_seconds=3.0),
        Outcome(2, "late", changed=0.9, simulated_seconds=9.0),
    ]
    keys = round_metrics(outcomes, LAYOUT)
    assert keys["mask/changed"] == pytest.approx(0.25)
    assert keys["time/simulated"] == 3.0


def test_late_clients_cost_their_downloads_and_what_the_hardware_executes():
    charge = Charge(round=0, client=0, downlink_bytes=7, uplink_bytes=50, flops_train=3.0, flops_paper=90.0)
    outcomes = [Outcome(0, charge=charge), Outcome(1, "late", charge=charge), Outcome(2, "late", charge=charge)]
    assert late_metrics(outcomes) == {"clients/late": 2, "flops/late": 6.0, "comm/late_bytes": 14}


@dataclass(frozen=True, kw_only=True)
class ReturnsATensor(FederatedAlgorithm):
    def train(self, message, client):
        return replace(super().train(message, client), metrics={"step": torch.tensor(0.5)})


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_metric_that_is_a_tensor_is_its_number(tmp_path):
    trainer = SmallFederation(tmp_path)(ReturnsATensor(), rounds=1)
    assert [row["local/step"] for row in rows(trainer.run_folder / "metrics.csv")] == ["0.5"]
    assert {row["local/step"] for row in rows(trainer.run_folder / "clients.csv")} == {"0.5", ""}
