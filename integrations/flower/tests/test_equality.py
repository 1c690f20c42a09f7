"""A deployment ends with the bytes of the simulation of the same YAML."""

from pathlib import Path

import pytest
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.testing.contents import comparable, rows, stored_records

from helpers.deployment import HOMES, simulated
from lightning_sparsefl_flower.comparison import compare

METHODS = {
    "FedAvg": {},
    "FedSpa": {"density": 0.5},
    "FedDIP": {},
    "PerFedMask": {},
    "FedLPS": {},
    "SCAFFOLD": {},
    "FedRep": {},
}
CAPACITIES = {"capacities": [0.5, 1.0]}


def disk_records(folder: Path):
    """The newest record of each client on the nodes' disks, without the masks."""
    found = {}
    for path in sorted(folder.glob("node-*/records/*/client-*/round-*.pt")):
        found[int(path.parent.name.removeprefix("client-"))] = load_plain(path)  # later rounds come later
    kept = {client: (record["memory"], record["buffers"]) for client, record in sorted(found.items())}
    return comparable({client: record for client, record in kept.items() if any(record)})


def memory_of(folder: Path):
    records = {client: versions[max(versions)] for client, versions in stored_records(folder)["nodes"].items()}
    kept = {client: (record["memory"], record["buffers"]) for client, record in sorted(records.items())}
    return comparable({client: record for client, record in kept.items() if any(record)})


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_are_those_of_the_simulation(deploy, tmp_path, method):
    federation = CAPACITIES if method in ("PerFedMask", "FedLPS") else {}
    deployment = deploy(method, METHODS[method], federation=federation)
    here = simulated(deployment.config, tmp_path / "simulated")
    there = deployment.fit()
    assert {part: where for part, where in compare(here, there).items() if where} == {}
    assert disk_records(tmp_path) == memory_of(here)
    assert stored_records(there)["nodes"] == {}  # nothing of the clients is on the server
    assert len(rows(there / "metrics.csv")) == 3
    assert (there / "config.yaml").is_file()


def test_a_server_without_a_test_set_has_no_scores_of_the_global_model(deploy, tmp_path):
    deployment = deploy()
    here = simulated(deployment.config, tmp_path / "simulated")
    there = deployment.fit(holdout=False)
    differing = {part for part, where in compare(here, there).items() if where}
    assert differing == {"metrics.csv"}
    ours = rows(here / "metrics.csv")
    assert rows(there / "metrics.csv") == [{k: v for k, v in r.items() if not k.startswith("global/")} for r in ours]


def test_a_message_holds_all_orders_of_a_node(deploy):
    deployment = deploy(trainer={"max_rounds": 1})
    deployment.fit()
    kinds = [kind for kind, _, _ in deployment.grid.requests]
    assert kinds.count("query") == len(HOMES)
    assert kinds.count("train") <= len(HOMES)
    assert kinds.count("evaluate") == len(HOMES)
