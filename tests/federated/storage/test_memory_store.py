"""The store in memory: versions, files, and what is refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.homed_records import HomedRecords
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_store import StoredRecords, commit_together
from lightning_sparsefl.federated.storage.safe_load import load_plain


def packed(number):
    return {"n": number, "w": torch.full((3,), float(number))}


def numbers(store, at=None):
    return {client: store.get(client, at)["n"] for client in store.clients(at)}


@pytest.fixture
def store(alone):
    return MemoryStore("server", alone)


def test_commit_and_load(tmp_path, alone, store):
    store.put(3, packed(3), 1)
    store.put(5, packed(5), 1)
    assert store.commit(tmp_path, 1).index == {3: {1: [1, 0]}, 5: {1: [1, 0]}}
    store.put(5, packed(55), 2)
    stored = store.commit(tmp_path, 2)
    assert stored.index == {3: {1: [1, 0]}, 5: {2: [2, 0]}}
    other = MemoryStore("server", alone)
    other.load(stored, tmp_path)
    assert numbers(other) == {3: 3, 5: 55}
    assert torch.equal(other.get(5)["w"], torch.full((3,), 55.0))
    assert other.get(4) is None


def test_two_stores_share_a_folder(tmp_path, alone, store):
    other = MemoryStore("nodes", alone)
    for number, each in enumerate((store, other)):
        each.put(0, packed(number), 1)
        each.commit(tmp_path, 1)
        each.discard_unreferenced(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nodes-000001-000.pt", "server-000001-000.pt"]


def test_stores_are_committed_together_as_one_by_one(tmp_path, alone, monkeypatch):
    exchanges, share = [], type(alone).share
    monkeypatch.setattr(type(alone), "share", lambda ranks, work: exchanges.append(1) or share(ranks, work))
    stored = {}
    for way in ("together", "one by one"):
        stores = [MemoryStore(name, alone) for name in ("server", "nodes")]
        for number, each in enumerate(stores):
            each.put(number, packed(number), 1)
        folder = tmp_path / way
        folder.mkdir()
        stored[way] = commit_together(stores, folder, 1) if way == "together" else [s.commit(folder, 1) for s in stores]
        stored[way, "exchanges"] = len(exchanges)
        exchanges.clear()
    assert stored["together"] == stored["one by one"]
    assert (stored["together", "exchanges"], stored["one by one", "exchanges"]) == (1, 2)


def test_only_the_newest_version_and_the_pinned_rounds_are_kept(tmp_path, alone, store):
    for round in (1, 2):
        store.put(0, packed(round), round)
    assert store.get(0, at=1) is None
    store.put(1, packed(10), 2)
    store.pin(2)
    for round in (3, 4, 5):
        store.put(0, packed(round), round)
    assert [store.get(0, at)["n"] for at in (2, 3, 4, 5, None)] == [2, 2, 2, 5, 5]
    stored = store.commit(tmp_path, 5)
    assert stored.index == {0: {2: [5, 0], 5: [5, 0]}, 1: {2: [5, 0]}}
    other = MemoryStore("server", alone)
    other.load(stored, tmp_path)
    other.pin(2)
    assert numbers(other, 2) == {0: 2, 1: 10}
    assert numbers(other) == {0: 5, 1: 10}
    other.pin(5)
    assert other.get(0, 4) is None
    assert other.commit(tmp_path, 6).index == {0: {5: [5, 0]}, 1: {2: [5, 0]}}


def test_versions_of_a_later_round_are_not_committed(tmp_path, alone, store):
    store.put(0, packed(1), 1)
    store.pin(1)
    store.put(0, packed(2), 2)
    stored = store.commit(tmp_path, 1)
    assert stored.index == {0: {1: [1, 0]}}
    assert store.commit(tmp_path, 2).index == {0: {1: [1, 0], 2: [2, 0]}}


def test_files_that_no_client_needs_are_deleted(tmp_path, store):
    for round in (1, 2, 3):
        store.put(0, packed(round), round)
        store.commit(tmp_path, round)
    store.discard_unreferenced(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["server-000002-000.pt", "server-000003-000.pt"]


def test_files_of_the_commit_before_stay_where_a_round_is_committed_again(tmp_path, store):
    for round in (1, 2):
        store.put(0, packed(round), round)
        store.commit(tmp_path, round)
    store.commit(tmp_path, 2)
    store.discard_unreferenced(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["server-000001-000.pt", "server-000002-000.pt"]


def test_another_runs_file_is_refused_and_nothing_is_taken_over(tmp_path, alone, store):
    other, stored = MemoryStore("server", alone), {}
    for number, (each, folder) in enumerate(((store, "a"), (other, "b"))):
        each.put(3, packed(number), 1)
        stored[folder] = each.commit(tmp_path / folder, 1)
    with pytest.raises(CheckpointMismatch, match=r"server-000001-000\.pt is damaged or of another run"):
        store.load(stored["a"], tmp_path / "b")
    assert numbers(store) == {3: 0}


def test_a_run_that_moves_writes_every_record_anew(tmp_path, alone, store):
    store.put(3, packed(3), 1)
    other = MemoryStore("server", alone)
    other.load(store.commit(tmp_path / "old", 1), tmp_path / "old", moved=True)
    assert other.commit(tmp_path / "new", 2).index == {3: {1: [2, 0]}}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["server-000002-000.pt"]


def test_records_inside_a_checkpoint_are_written_by_the_next_commit(tmp_path, store):
    store.load(StoredRecords(records={7: {3: packed(7)}}), tmp_path)
    assert numbers(store) == {7: 7}
    assert store.commit(tmp_path, 4).index == {7: {3: [4, 0]}}


SECOND = SimpleNamespace(rank=1, size=2, first=False)
"""The second of two ranks, whose clients have odd numbers."""


def test_only_the_first_rank_writes_what_all_ranks_hold(tmp_path):
    common, own = MemoryStore("server", SECOND), MemoryStore("nodes", SECOND, divided=True)
    for store in (common, own):
        store.put(1, packed(1), 1)
    assert common.write(tmp_path, 1) == ({}, None)
    assert own.write(tmp_path, 1).versions == {1: [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["nodes-000001-001.pt"]


def test_a_rank_takes_over_the_records_of_its_own_clients(tmp_path):
    store = MemoryStore("nodes", SECOND, divided=True)
    store.load(StoredRecords(records={client: {3: packed(client)} for client in range(4)}), tmp_path)
    assert numbers(store) == {1: 1, 3: 3}
    assert store.write(tmp_path, 4).versions == {1: [3], 3: [3]}


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    write_atomically(path, {"a": 1})

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, {"a": 2})
    assert load_plain(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("keep", [0, 10, 400])
def test_torn_files_are_refused_in_a_sentence(tmp_path, keep):
    path = tmp_path / "x.pt"
    write_atomically(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointMismatch, match=r"x\.pt is damaged or not a checkpoint"):
        load_plain(path)


def test_a_file_without_permission_is_not_called_damaged(tmp_path, monkeypatch):
    def denied(self, *args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    write_atomically(tmp_path / "x.pt", {"a": 1})
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointMismatch, match=r"x\.pt cannot be read \(Permission denied\); make it readable"):
        load_plain(tmp_path / "x.pt")


def test_a_record_visits_the_rank_that_trains_its_client_for_one_phase():
    first = SimpleNamespace(rank=0, size=2, first=True, exchange=lambda outgoing: [{}, {1: packed(1)}])
    records = HomedRecords(MemoryStore("nodes", first, divided=True), first)
    records.fetch({1: 3}, [[1], []])
    assert records.get(1, 3)["n"] == 1
    records.fetch({}, None)
    assert records.get(1, 3) is None
