"""Records by owner, as plain values and back."""

import pytest
import torch

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.records import NodeRecord, ServerRecord

CPU = torch.device("cpu")
MASK = torch.arange(65).reshape(13, 5) % 3 == 0
SERVER = ServerRecord(shared={"masks": {"w": MASK}, "pulls": [1, 2.5], "none": None}, held="digest", version=3)
NODE = NodeRecord(memory={"weights": {"w": torch.randn(13, 5)}}, buffers={"b": torch.ones(2)}, masks={"w": MASK})


def test_records_come_back():
    server = ServerRecord.from_plain(SERVER.to_plain(), 0, CPU)
    assert torch.equal(server.shared["masks"]["w"], MASK)
    assert (server.shared["pulls"], server.shared["none"]) == ([1, 2.5], None)
    assert (server.held, server.version) == ("digest", 3)
    node = NodeRecord.from_plain(NODE.to_plain(), 0, CPU)
    assert torch.equal(node.memory["weights"]["w"], NODE.memory["weights"]["w"])
    assert torch.equal(node.buffers["b"], torch.ones(2))
    assert torch.equal(node.masks["w"], MASK)


def test_a_node_without_anything_to_keep_has_an_empty_record():
    assert not NodeRecord()
    assert NodeRecord(memory={"a": 1})


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (ServerRecord, {"shared": "all"}),
        (ServerRecord, {"new": {}}),
        (ServerRecord, {"held": 3}),
        (ServerRecord, {"version": "3"}),
        (ServerRecord, {"shared": {"masks": torch.ones(3)}}),
        (ServerRecord, {"shared": {"masks": {"w": 1}}}),
        (NodeRecord, {"memory": [1]}),
        (NodeRecord, {"buffers": 1}),
        (NodeRecord, {"masks": {"w": torch.ones(3)}}),
        (
            NodeRecord,
            {"masks": {"w": {"packed_mask": torch.zeros(1, dtype=torch.uint8), "shape": [2**40, 5]}}},
        ),
    ],
)
def test_a_damaged_record_is_refused_with_the_clients_number(kind, damage):
    good = (SERVER if kind is ServerRecord else NODE).to_plain()
    with pytest.raises(CheckpointMismatch, match=r"The record of client 5 is damaged, or of another version \("):
        kind.from_plain(good | damage, 5, CPU)


def test_no_memory_for_a_record_is_not_the_records_fault(monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr("lightning_sparsefl.federated.storage.records.unpack_plain", exhausted)
    with pytest.raises(MemoryError):
        ServerRecord.from_plain(SERVER.to_plain(), 4, CPU)
