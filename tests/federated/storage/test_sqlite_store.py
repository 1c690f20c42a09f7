"""The store on disk against a dict, and what a crash, a stranger or a flipped bit does to its file."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.federated.storage import sqlite_store
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_database import RecordDatabase, row_digest
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.federated.storage.shards import reference
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.federated.tracking.tensorboard import packed_masks

NAME = "server"
SHARD = f"{NAME}-000"
FILE = f"{SHARD}.sqlite"


def packed(number):
    return {"n": number, "shared": pack_plain({"masks": {"w": torch.arange(16) < number % 16}})}


def numbers(records):
    return {client: versions[max(versions)]["n"] for client, versions in records.items()}


@pytest.fixture
def new(alone):
    """Makes a store."""
    return partial(SqliteStore, NAME, alone)


class Run:
    """Rounds on a store, with a dict of numbers as the slow twin; two checkpoints are kept."""

    def __init__(self, folder, rng, ranks):
        self.folder, self.rng, self.ranks, self.store = folder, rng, ranks, SqliteStore(NAME, ranks)
        self.now, self.round, self.pinned, self.checkpoints = {}, 0, None, []

    def play(self):
        self.round += 1
        for client in self.rng.sample(range(12), 3):
            self.now[client] = number = self.rng.randrange(10**6)
            self.store.put(client, packed(number), self.round)
        if self.rng.random() < 0.2:
            self.pinned = (self.round, dict(self.now))
            self.store.pin(self.round)

    def commit(self, torn=False):
        stored = self.store.commit(self.folder, self.round)
        if not torn:  # else the process dies before the checkpoint is written
            self.checkpoints = [*self.checkpoints[-1:], (stored, self.round, dict(self.now), self.pinned)]
            self.store.discard_unreferenced(self.folder)

    def resume(self):
        stored, self.round, now, self.pinned = self.rng.choice(self.checkpoints)
        self.checkpoints = [c for c in self.checkpoints if c[1] <= self.round]
        self.now, self.store = dict(now), SqliteStore(NAME, self.ranks)
        self.store.load(stored, self.folder)
        if self.pinned is not None:
            self.store.pin(self.pinned[0])

    def check(self):
        check(self.store, self.now, self.pinned)
        for stored, _, now, pinned in self.checkpoints:
            for kind in (SqliteStore, MemoryStore):
                other = kind(NAME, self.ranks)
                other.load(stored, self.folder)
                if pinned is not None:
                    other.pin(pinned[0])
                check(other, now, pinned)


def check(store, now, pinned):
    assert list(store.clients()) == sorted(now)
    assert {client: versions[max(versions)]["n"] for client, versions in store.records().items()} == now
    assert {client: store.get(client)["n"] for client in store.clients()} == now
    assert store.get(99) is None
    if pinned is not None:
        round, then = pinned
        assert list(store.clients(round)) == sorted(then)
        assert {client: store.get(client, round)["n"] for client in store.clients(round)} == then


@pytest.mark.slow_after_first
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_commits_crashes_and_resumes_reads_as_a_dict(tmp_path, seed, alone):
    rng = random.Random(seed)
    run = Run(tmp_path, rng, alone)
    for _ in range(25):
        run.play()
        torn = bool(run.checkpoints) and rng.random() < 0.2
        if rng.random() < 0.6:
            run.commit(torn)
        if torn or (run.checkpoints and rng.random() < 0.2):
            run.resume()
        run.check()


def test_a_kill_inside_a_commit_leaves_the_round_before(tmp_path, monkeypatch, alone):
    run = Run(tmp_path, random.Random(0), alone)
    run.play()
    run.commit()
    run.play()

    def killed(records):
        for number, record in enumerate(records):
            yield record
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    commit = RecordDatabase.commit
    monkeypatch.setattr(
        RecordDatabase,
        "commit",
        lambda self, run, after, round, records, pins: commit(self, run, after, round, killed(records), pins),
    )
    child = os.fork()
    if child == 0:
        run.commit()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.undo()
    assert (tmp_path / f"{FILE}-journal").stat().st_size > 0
    run.resume()
    run.check()
    run.play()
    run.commit()
    run.check()


def test_nothing_is_left_of_what_no_checkpoint_needs(tmp_path, new):
    store = new()
    for round_ in range(1, 30):
        store.put(round_ % 2, packed(round_), round_)
        store.commit(tmp_path, round_)
    with sqlite3.connect(tmp_path / FILE) as database:
        kept = sorted(database.execute("SELECT client, round FROM records"))
    database.close()
    assert kept == [(0, 26), (0, 28), (1, 27), (1, 29)]


def steps_of_a_commit(folder, stored, new):
    """Instructions of SQLite for one commit of two records, with so many stored."""
    store = new()
    for client in range(stored):
        store.put(client, packed(client), 1)
    store.commit(folder, 1)
    counted = []
    for round_ in range(2, 6):
        store._shards[0]._database.set_progress_handler(lambda: counted.append(1), 10)
        store.put(0, packed(0), round_)
        store.put(stored + round_, packed(1), round_)
        store.commit(folder, round_)
        store.get(stored // 2)
    return len(counted)


def test_a_commit_costs_what_changed_and_not_what_is_stored(tmp_path, new):
    assert steps_of_a_commit(tmp_path / "many", 2000, new) <= 1.2 * steps_of_a_commit(tmp_path / "few", 20, new)


def test_memory_holds_nothing_after_a_commit_and_masks_come_from_the_file(tmp_path, new):
    store = new()
    store.put(3, packed(3), 1)
    store.put(5, {"n": 5, "shared": {}}, 1)
    store.put(8, packed(8), 1)
    assert set(packed_masks(store, 2)) == {3}
    store.commit(tmp_path, 1)
    assert store._new == {}
    assert set(packed_masks(store, 3)) == {3, 8}


@pytest.mark.parametrize("old", [MemoryStore, SqliteStore])
@pytest.mark.parametrize("kind", [MemoryStore, SqliteStore])
def test_a_run_may_go_on_in_another_folder_and_with_another_store(tmp_path, old, kind, alone):
    first, second, again = old(NAME, alone), kind(NAME, alone), kind(NAME, alone)
    for client in range(4):
        first.put(client, packed(client), 1)
    second.load(first.commit(tmp_path / "a", 1), tmp_path / "a", moved=True)
    second.put(2, packed(20), 2)
    again.load(second.commit(tmp_path / "b", 2), tmp_path / "b")
    assert numbers(again.records()) == {0: 0, 1: 1, 2: 20, 3: 3}


def test_records_of_a_copy_are_written_by_the_next_commit(tmp_path, new):
    store = new()
    store.load(StoredRecords(records={7: {3: packed(7)}}), tmp_path)
    again, committed = new(), store.commit(tmp_path, 4)
    again.load(committed, tmp_path)
    assert numbers(again.records()) == {7: 7}


def test_only_a_pinned_version_is_kept_before_it_is_committed(new):
    store = new()
    for round_ in (1, 2):
        store.put(1, packed(round_), round_)
    assert [store.get(1, at) for at in (0, 1)] == [None, None]
    store.put(0, packed(1), 1)
    store.pin(1)
    store.put(0, packed(2), 2)
    assert [store.get(0, at)["n"] for at in (1, 2, None)] == [1, 2, 2]
    assert [list(store.clients(at)) for at in (0, 1, None)] == [[], [0], [0, 1]]


def test_versions_of_a_later_round_are_not_committed(tmp_path, new):
    store, again = new(), new()
    store.put(0, packed(1), 1)
    store.pin(1)
    store.put(0, packed(2), 2)
    for round_ in (1, 2):
        again.load(store.commit(tmp_path, round_), tmp_path)
        assert numbers(again.records()) == {0: round_}


def test_what_a_crash_left_of_a_later_round_is_not_read(tmp_path, new):
    store, again = new(), new()
    store.put(0, packed(1), 1)
    before = store.commit(tmp_path, 1)
    store.put(0, packed(2), 2)
    store.commit(tmp_path, 2)
    again.load(before, tmp_path)
    assert [again.get(0, at)["n"] for at in (1, 2, None)] == [1, 1, 1]


def test_a_copy_that_would_not_fit_into_memory_is_refused(tmp_path, monkeypatch, new):
    store = new()
    store.put(0, packed(0), 1)
    store.commit(tmp_path, 1)
    monkeypatch.setattr(sqlite_store, "_MOST_BYTES_OF_A_COPY", 100)
    with pytest.raises(InvalidOption, match="`save_weights_only` of `ModelCheckpoint`"):
        store.records()


def test_a_rank_that_sees_another_disk_says_so(tmp_path, new):
    first, other = new(), new()
    first.put(0, packed(0), 1)
    first.commit(tmp_path / "here", 1)
    other._shards[0] = other._visible(0, tmp_path / "here", 1)
    other._committed = 1
    assert other.get(0)["n"] == 0
    with pytest.raises(InvalidOption, match="a run folder that all ranks see"):
        other._visible(0, tmp_path / "there", 2)


def test_a_checkpoint_that_is_too_old_is_refused(tmp_path, new):
    store = new()
    for round_ in range(1, 6):
        store.put(0, packed(round_), round_)
        committed = store.commit(tmp_path, round_)
    for gone in (1, 2, 6):
        with pytest.raises(CheckpointMismatch, match=f"records of round {gone} any more, or not yet"):
            new().load(dataclasses.replace(committed, index=[gone, 1]), tmp_path)


def test_a_reader_says_so_where_the_run_goes_on_and_deletes_what_it_reads(tmp_path, new):
    trained, reader = new(), new()
    for round_ in range(1, 8):
        trained.put(0, packed(round_), round_)
        stored = trained.commit(tmp_path, round_)
        if round_ == 2:
            reader.load(stored, tmp_path)
        if 2 <= round_ <= 4:  # two further commits serve it
            assert reader.get(0)["n"] == 2
        elif round_ > 4:
            for client in (0, 1):  # one without a record may have had one
                with pytest.raises(CheckpointMismatch, match="records of round 2 any more, or not yet"):
                    reader.get(client)
    assert trained.get(0)["n"] == 7


class Stored(NamedTuple):
    """A folder with a database, and how a checkpoint refers to it."""

    folder: Path
    reference: StoredRecords

    def change(self, statement, *values):
        with closing(sqlite3.connect(self.folder / FILE)) as database, database:
            database.execute(statement, values)


@pytest.fixture
def stored(tmp_path, new):
    store = new()
    for client in range(3):
        store.put(client, packed(client + 1), 1)
    reference = store.commit(tmp_path, 1)
    store._shards[0].close()
    return Stored(tmp_path, reference)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM records WHERE client = 1",
        "UPDATE records SET client = 7 WHERE client = 1",
        "UPDATE records SET round = 0 WHERE client = 1",
        "INSERT INTO records SELECT 7, round, digest, content FROM records WHERE client = 1",
        "UPDATE records SET (digest, content) = (SELECT digest, content FROM records WHERE client = 0)",
        "UPDATE records SET digest = NULL WHERE client = 1",
        "UPDATE records SET client = 'one' WHERE client = 1",
        "UPDATE served SET total = 0",
    ],
    ids=["deleted", "renumbered", "of another round", "duplicated", "copied", "null", "text", "sum"],
)
@pytest.mark.parametrize("kind", [MemoryStore, SqliteStore])
def test_rows_that_are_not_those_of_the_checkpoint_are_refused_by_name(stored, statement, kind, alone):
    stored.change(statement)
    with pytest.raises(CheckpointMismatch, match=r"server-000\.sqlite"):
        kind(NAME, alone).load(stored.reference, stored.folder)


@pytest.mark.parametrize("kind", [MemoryStore, SqliteStore])
def test_a_database_of_another_run_is_refused_by_name(stored, kind, alone):
    store = kind(NAME, alone)
    store.run = "f" * 32
    with pytest.raises(CheckpointMismatch, match=r"server-000\.sqlite is of another run than the checkpoint"):
        store.load(stored.reference, stored.folder)


def test_a_run_that_starts_over_replaces_what_another_left(stored, new):
    store = new()
    store.run = "f" * 32
    store.put(5, packed(5), 1)
    again, committed = new(), store.commit(stored.folder, 1)
    again.run = store.run
    again.load(committed, stored.folder)
    assert numbers(again.records()) == {5: 5}


def test_the_sum_of_a_pinned_round_between_commits_is_checked(tmp_path, new):
    store = new()
    for round_ in range(1, 4):
        store.put(round_ % 2, packed(round_), round_)
        if round_ == 2:
            store.pin(2)
    committed = store.commit(tmp_path, 3)
    assert set(committed.checksums) == {"0/2", "0/3"}
    new().load(committed, tmp_path)
    Stored(tmp_path, committed).change("DELETE FROM records WHERE round = 1")
    with pytest.raises(CheckpointMismatch, match="records of round 2 that the checkpoint was written with"):
        new().load(committed, tmp_path)


def test_a_torn_record_of_the_newest_commit_is_refused_by_name(stored, new):
    stored.change("UPDATE records SET content = substr(content, 1, 100)")
    with pytest.raises(CheckpointMismatch, match=r"damaged record of client 0 \(its checksum does not match\)"):
        new().load(stored.reference, stored.folder)


def test_an_older_torn_record_is_refused_as_it_is_read(stored, new):
    store = new()
    store.load(stored.reference, stored.folder)
    commits = {}
    for round_, client in enumerate((1, 2), start=2):
        store.put(client, packed(round_), round_)
        commits[round_] = store.commit(stored.folder, round_)
    store._shards[0].close()
    stored.change("UPDATE records SET content = substr(content, 1, 100) WHERE client < 2")
    store = new()
    store.load(commits[3], stored.folder)
    store.get(2)
    with pytest.raises(CheckpointMismatch, match="damaged record of client 1"):
        store.get(1)
    with pytest.raises(CheckpointMismatch, match="damaged record of client 1"):
        new().load(commits[2], stored.folder)


def test_pickled_code_in_a_record_is_refused(stored, new):
    torch.save({"f": MemoryStore}, stored.folder / "x.pt")
    content = (stored.folder / "x.pt").read_bytes()
    stored.change("DELETE FROM records WHERE client > 0")
    digest = row_digest(0, 1, content)
    stored.change("UPDATE records SET content = ?, digest = ?", content, digest)
    database = RecordDatabase(stored.folder, SHARD)
    forged = reference(1, 1, {0: {1: f"{database._sum(1):032x}"}})
    database.close()
    stored.change("UPDATE served SET total = ?", forged.checksums["0/1"])
    with pytest.raises(CheckpointMismatch, match="damaged record of client 0"):
        new().load(forged, stored.folder)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER bad AFTER INSERT ON records BEGIN DELETE FROM records; END",
        "CREATE VIEW bad AS SELECT 1",
        "DROP TABLE superseded",
    ],
)
def test_a_file_of_another_layout_is_refused(stored, statement, new):
    stored.change(statement)
    with pytest.raises(CheckpointMismatch, match="is not a database of clients' records"):
        new().load(stored.reference, stored.folder)


@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_a_file_that_is_none_is_refused(stored, content, new):
    path = stored.folder / FILE
    path.write_bytes(path.read_bytes()[:5000] if content is None else content)
    with pytest.raises(CheckpointMismatch, match=r"server-000\.sqlite"):
        new().load(stored.reference, stored.folder)


def test_a_missing_file_is_refused(tmp_path, new):
    with pytest.raises(CheckpointMismatch, match=r"There is no .*server-000\.sqlite"):
        new().load(StoredRecords([1, 1]), tmp_path)


@pytest.mark.parametrize("index", [1, [1], [1, 0], [-1, 1], [1, 2.0], [True, 1], [1, 2**40], "1"])
@pytest.mark.parametrize("kind", [MemoryStore, SqliteStore])
def test_a_reference_of_another_form_is_refused(tmp_path, index, kind, alone):
    with pytest.raises(CheckpointMismatch, match="expected a round and a number of shards"):
        kind(NAME, alone).load(StoredRecords(index), tmp_path)
