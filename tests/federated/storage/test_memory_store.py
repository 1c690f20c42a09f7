import numpy as np
import pytest
import torch

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.atomic_files import fingerprint, load_plain, write_atomically
from lightning_sparsefl.federated.storage.records import (
    ClientRecord,
    MemoryStore,
    pack_plain,
    pack_record,
    unpack_plain,
)

CPU = torch.device("cpu")


def record(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(13, 5, generator=g) < 0.5
    return ClientRecord(
        shared={"masks": {"w": mask}, "pulls": [1, 2.5], "name": "a", "none": None, "flag": True},
        memory={"weights": {"w": torch.randn(13, 5, generator=g)}},
        held="digest",
    )


def assert_equal(a, b):
    assert torch.equal(a.shared["masks"]["w"], b.shared["masks"]["w"])
    assert torch.equal(a.memory["weights"]["w"], b.memory["weights"]["w"])
    assert {k: v for k, v in a.shared.items() if k != "masks"} == {k: v for k, v in b.shared.items() if k != "masks"}
    assert a.held == b.held


def test_masks_are_packed_to_a_bit_and_come_back():
    mask = torch.rand(1000) < 0.5
    packed = pack_plain({"m": mask})
    assert packed["m"]["packed_mask"].numel() == 125
    assert torch.equal(unpack_plain(packed, CPU)["m"], mask)


def test_what_a_checkpoint_cannot_hold_is_refused_by_name():
    with pytest.raises(TypeError, match="hold a set"):
        pack_plain({"x": {1, 2}})


def test_numbers_of_numpy_become_plain(tmp_path):
    """They are floats and strings, too, and could not be read again."""
    packed = pack_plain({np.str_("a"): [np.float64(0.1), (1, True)]})
    write_atomically(tmp_path / "x.pt", packed)
    assert load_plain(tmp_path / "x.pt") == {"a": [0.1, [1, True]]}


def test_a_fingerprint_tells_contents_apart_and_not_how_they_are_held():
    wide = torch.arange(6.0).reshape(2, 3)
    same = [{"a": wide[:, :2], "b": [1, None]}, {"b": (1, None), "a": wide[:, :2].contiguous()}]
    assert fingerprint(same[0]) == fingerprint(same[1])
    others = [
        wide,
        wide.reshape(3, 2),
        wide.int(),
        wide[0],
        [1, 2],
        [[1], 2],
        ["12"],
        ["1", "2"],
        1,
        1.0,
        "1",
        True,
        {},
    ]
    assert len({fingerprint(other) for other in others}) == len(others)


def test_commit_and_load(tmp_path):
    store = MemoryStore(CPU)
    store.put(3, pack_record(record(3)), 1)
    store.put(5, pack_record(record(5)), 1)
    assert store.commit(tmp_path, 1) == {3: 1, 5: 1}
    store.put(5, pack_record(record(55)), 2)
    index = store.commit(tmp_path, 2)
    assert index == {3: 1, 5: 2}
    other = MemoryStore(CPU)
    other.load(index, tmp_path, {}, store.checksums)
    assert_equal(other.get(3), record(3))
    assert_equal(other.get(5), record(55))
    assert 4 not in other
    assert other.get(4) == ClientRecord()


def test_files_that_no_client_needs_are_deleted(tmp_path):
    store = MemoryStore(CPU)
    for round_ in (1, 2, 3):
        store.put(0, pack_record(record(round_)), round_)
        store.commit(tmp_path, round_)
    store.discard_unreferenced(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["round-000002.pt", "round-000003.pt"]


def test_another_runs_file_is_refused_and_nothing_is_taken_over(tmp_path):
    store, other = MemoryStore(CPU), MemoryStore(CPU)
    for each, folder in ((store, "a"), (other, "b")):
        each.put(3, pack_record(record(len(folder) if each is store else 9)), 1)
        each.commit(tmp_path / folder, 1)
    with pytest.raises(CheckpointMismatch, match=r"round-000001\.pt is damaged or of another run"):
        store.load({3: 1}, tmp_path / "b", {}, store.checksums)
    assert_equal(store.get(3), record(1))


def test_a_run_that_moves_writes_every_record_anew(tmp_path):
    store, other = MemoryStore(CPU), MemoryStore(CPU)
    store.put(3, pack_record(record(3)), 1)
    store.commit(tmp_path / "old", 1)
    other.load({3: 1}, tmp_path / "old", {}, store.checksums, moved=True)
    assert other.commit(tmp_path / "new", 2) == {3: 2}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["round-000002.pt"]


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


@pytest.mark.parametrize(
    "damage",
    [
        {"shared": "all"},
        {"memory": [1]},
        {"new": {}},
        {"shared": {"masks": torch.ones(3)}},
        {"shared": {"masks": {"w": 1}}},
        {"shared": {"masks": {"w": {"packed_mask": torch.zeros(1, dtype=torch.uint8), "shape": [2**40, 5]}}}},
    ],
)
def test_a_record_that_is_none_is_refused_by_the_clients_number(damage):
    store = MemoryStore(CPU)
    store.load({}, None, {4: pack_record(record(0)), 5: pack_record(record(0)) | damage}, {})
    store.get(4)
    with pytest.raises(CheckpointMismatch, match=r"The record of client 5 is damaged, or of another version \("):
        store.get(5)


def test_no_memory_for_a_record_is_not_the_records_fault(monkeypatch):
    store = MemoryStore(CPU)
    store.put(4, pack_record(record(0)), 1)
    monkeypatch.setattr("lightning_sparsefl.federated.storage.records.unpack_plain", exhausted)
    with pytest.raises(MemoryError):
        store.get(4)


def exhausted(*_):
    raise MemoryError


@pytest.mark.parametrize("keep", [0, 10, 400])
def test_torn_files_are_refused_in_a_sentence(tmp_path, keep):
    path = tmp_path / "x.pt"
    write_atomically(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointMismatch, match=r"x\.pt is damaged or not a checkpoint"):
        load_plain(path)


def test_pickled_code_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"f": MemoryStore}, path)
    with pytest.raises(CheckpointMismatch, match="not a checkpoint of plain types"):
        load_plain(path)
