"""What `aggregate` and `observe` learn at the end of a round."""

import csv
from dataclasses import dataclass, replace

import torch

from lightning_sparsefl import FedAvg
from lightning_sparsefl.federated import FederatedAlgorithm


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
