"""What `aggregate` and `observe` learn at the end of a round."""

import csv
from dataclasses import dataclass, replace

import pytest
import torch

from lightning_sparsefl import FedAvg
from lightning_sparsefl.federated import FederatedAlgorithm
from lightning_sparsefl.testing.contents import rows


@dataclass(frozen=True, kw_only=True)
class Slowest(FederatedAlgorithm):
    """Keeps the time of the slowest client of a round, and what each client was told of it."""

    def init(self, weights, fleet):
        return replace(super().init(weights, fleet), extra={"time": {"slowest": torch.zeros(())}})

    def simulated_seconds(self, view, flops, bytes_up):
        return float(view.id)

    def aggregate(self, server, merged):
        slowest = max(report["seconds"] for report in merged.reports.values())
        return replace(super().aggregate(server, merged), extra={"time": {"slowest": torch.tensor(slowest)}})

    def observe(self, server, view, report):
        slowest = float(server.extra["time"]["slowest"])
        return {"own": report["seconds"], "slowest": slowest, "before": view.round, "after": server.round}


@dataclass(frozen=True, kw_only=True)
class Grows(FederatedAlgorithm):
    """Changes the state in place, and notes how far clients are from their initial weights."""

    def train(self, message, client):
        distance = max(float((weight - client.initial[name]).max()) for name, weight in message.weights.items())
        return replace(super().train(message, client), metrics={"distance": distance})

    def aggregate(self, server, merged):
        for weight in server.weights.values():
            weight.add_(1.0)
        return server


def test_initial_weights_do_not_follow_a_state_that_is_changed_in_place(federation):
    found = [float(row["local/distance"]) for row in rows(federation(Grows(), rounds=3).run_folder / "metrics.csv")]
    assert found == pytest.approx([0.0, 1.0, 2.0], abs=1e-5)


def test_seconds_reach_the_merge_and_clients_are_observed_with_the_state_after_it(federation, stored_records):
    records = stored_records(federation(Slowest(), rounds=1).run_folder)["server"]
    assert len(records) == 4
    for client, versions in records.items():
        shared = versions[1]["shared"]
        assert shared == {"own": float(client), "slowest": float(max(records)), "before": 0, "after": 1}


def test_records_that_say_the_same_are_written_once(federation, stored_records):
    """FedAvg keeps nothing about a client but that it has trained."""
    folder = federation(FedAvg(), rounds=4).run_folder
    with (folder / "clients.csv").open() as file:
        trained = [(int(row["client"]), int(row["round"])) for row in csv.DictReader(file) if row["trained"] == "1"]
    first = {client: min(round for other, round in trained if other == client) for client, _ in trained}
    assert len(trained) > len(first)
    versions = {client: set(versions) for client, versions in stored_records(folder)["server"].items()}
    assert versions == {client: {round + 1} for client, round in first.items()}
