"""Node records stay with their homes: each rank writes its own, and any other number of ranks reads them."""

import os
import signal
import sqlite3
from contextlib import closing

import pytest
import torch

from lightning_sparsefl import Ditto, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import RankFailed
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.federated.storage.memory_store import read_stored
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.federated.storage.shards import shards_of
from lightning_sparsefl.models import MLP

WEIGHTS = 8 * 600 + 600 + 600 * 4 + 4


def fit(root, store, stages, monkeypatch):
    """Train for some rounds with each number of ranks in turn; return what is left, and the files of the nodes."""
    gather = Ranks._gather_bytes

    def small(ranks, payload, *room):
        assert len(payload) < 4 * WEIGHTS, "a gathered value is as large as a client's weights"
        return gather(ranks, payload, *room)

    monkeypatch.setattr(Ranks, "_gather_bytes", small)
    for rounds, devices in stages:
        trainer = FederatedTrainer(
            algorithm=Ditto(),
            federation=Federation(clients_per_round=4, eval_clients=1, pictures_every_n_rounds=0, store=store),
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=rounds,
            default_root_dir=str(root),
            logger=False,
            enable_progress_bar=False,
            seed=0,
        )
        torch.manual_seed(0)
        data = FederatedBlobs(num_clients=7, dim=8, num_train=140, batch_size=20, eval_split="test")
        trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(600,)), data, "auto")
    folder = trainer.run_folder / "checkpoints"
    content = load_checkpoint(folder / "last.ckpt")["sparsefl"]
    stored = StoredRecords(**content["node records"])
    records = read_stored(stored, folder / "clients", "nodes", content["run"])
    return fingerprint(content["state"]), fingerprint(records), sorted(records), stored, folder / "clients"


@pytest.mark.slow_after_first
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_records_are_read_by_any_other_number_of_ranks(store, tmp_path, monkeypatch):
    *straight, _, _ = fit(tmp_path / "straight", store, [(4, 1)], monkeypatch)
    *resumed, stored, folder = fit(tmp_path / "resumed", store, [(1, 3), (2, 2), (3, 1), (4, 3)], monkeypatch)
    assert straight == resumed
    if store == "ram":
        ranks = {name.rpartition("-")[2] for name in stored.checksums}
        assert len(ranks) > 1, "several ranks have written files"
        assert {path.name for path in folder.glob("nodes-*")} >= set(stored.checksums)
    else:
        assert stored.index == [4, 3], "the run goes on with the shards that it began with"
        assert {shard: clients_in(path) for shard, path in shards_of("nodes", folder).items()} == {
            shard: set(range(shard, 7, 3)) & set(resumed[2]) for shard in range(3)
        }


def clients_in(path):
    with closing(sqlite3.connect(path)) as database:
        return {client for (client,) in database.execute("SELECT client FROM records")}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_damaged_file_of_one_rank_makes_all_go_back(store, tmp_path, monkeypatch):
    *straight, _, _ = fit(tmp_path / "straight", store, [(3, 1)], monkeypatch)
    *_, folder = fit(tmp_path / "damaged", store, [(2, 2)], monkeypatch)
    if store == "ram":
        (folder / "nodes-000002-001.pt").write_bytes(b"torn")
    else:
        with closing(sqlite3.connect(folder / "nodes-001.sqlite")) as database, database:
            database.execute("UPDATE records SET content = substr(content, 1, 100) WHERE round = 2")
    *resumed, _, _ = fit(tmp_path / "damaged", store, [(3, 2)], monkeypatch)
    assert straight == resumed
    assert (folder.parent / "last.ckpt.refused").exists()


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["server-001", "nodes-001"])
def test_a_rank_that_dies_after_its_own_commit_leaves_the_round_before(name, tmp_path, monkeypatch):
    *straight, _, _ = fit(tmp_path / "straight", "disk", [(4, 1)], monkeypatch)
    commit = RecordDatabase.commit

    def killed(self, run, after, round, records, pins):
        sums = commit(self, run, after, round, records, pins)
        if self.name == name and round == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return sums

    monkeypatch.setattr(RecordDatabase, "commit", killed)
    with pytest.raises(RankFailed):
        fit(tmp_path / "killed", "disk", [(4, 2)], monkeypatch)
    monkeypatch.setattr(RecordDatabase, "commit", commit)
    (last,) = (tmp_path / "killed").glob("*/*/checkpoints/last.ckpt")
    assert load_checkpoint(last)["epoch"] == 2
    *resumed, _, _ = fit(tmp_path / "killed", "disk", [(4, 2)], monkeypatch)
    assert straight == resumed


@pytest.mark.slow_after_first
def test_shards_of_a_run_that_starts_over_with_fewer_ranks_are_deleted(tmp_path, monkeypatch):
    *_, folder = fit(tmp_path, "disk", [(1, 3)], monkeypatch)
    for path in folder.parent.glob("*.ckpt"):
        path.unlink()
    *_, stored, again = fit(tmp_path, "disk", [(1, 2)], monkeypatch)
    assert (again, stored.index) == (folder, [1, 2])
    assert sorted(shards_of("nodes", folder)) == sorted(shards_of("server", folder)) == [0, 1]
