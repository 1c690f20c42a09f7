"""Errors of full disks, wherever they are met."""

import errno
import io
import os

import pytest
import torch

from lightning_sparsefl import files
from lightning_sparsefl.errors import ClientFailed, DiskFull
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.disk_full import raise_disk_full
from lightning_sparsefl.federated.storage.memory_store import MemoryStore


class SmallDisk(io.FileIO):
    def __init__(self, path, room):
        super().__init__(path, "xb")
        self.room = room

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_reported_as_such_wherever_torch_meets_it(tmp_path, monkeypatch):
    path, tree = tmp_path / "x.pt", {"a": torch.ones(100), "b": torch.ones(3000)}
    write_atomically(path, tree)
    size = path.stat().st_size
    for room in range(0, size, size // 40):
        monkeypatch.setattr(files, "_create", lambda path, mode, room=room: SmallDisk(path, room))
        with pytest.raises(DiskFull, match="No space left"), raise_disk_full(tmp_path):
            write_atomically(path, tree)
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def failing(error, cause):
    with raise_disk_full(os.curdir):
        raise error from cause


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_is_a_disk(number):
    for error, cause in ((OSError(number, "full"), None), (RuntimeError("torch's own"), OSError(number, "full"))):
        with pytest.raises(DiskFull, match=r"`ckpt_path: last`"):
            failing(error, cause)


def test_other_errors_are_no_full_disk():
    own = ClientFailed("its disk is full", client=0, round=0, rank=0)
    for error, cause in (
        (RuntimeError("no luck"), None),
        (OSError(errno.EIO, "Input/output error"), None),
        (own, OSError(errno.ENOSPC, "full")),
    ):
        with pytest.raises(type(error)) as raised:
            failing(error, cause)
        assert raised.value is error


def test_ranks_get_the_message_of_a_full_disk(alone, tmp_path, monkeypatch):
    """The others get its text alone, so that it is converted where it is met."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    store = MemoryStore("server", alone)
    monkeypatch.setattr(store, "write", full)
    with pytest.raises(DiskFull, match=r"`ckpt_path: last`"):
        store.commit(tmp_path, 1)
