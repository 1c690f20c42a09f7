"""Files that are written whole or not at all, on full disks and beside other people's links."""

import errno
import io
import os

import pytest
import torch

from lightning_sparsefl.errors import ClientFailed, DiskFull
from lightning_sparsefl.federated.storage import atomic_files
from lightning_sparsefl.federated.storage.atomic_files import raise_disk_full, write_atomically, write_text_atomically


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
        monkeypatch.setattr(atomic_files, "_create", lambda path, room=room: SmallDisk(path, room))
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


def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "x.pt"
    victim.write_text("precious")
    for write in (lambda: write_atomically(path, {"a": 1}), lambda: write_text_atomically(path, "text")):
        (tmp_path / f".x.pt.{os.getpid()}.tmp").symlink_to(victim)
        write()
        assert not path.is_symlink()
    assert victim.read_text() == "precious"
    assert path.read_text() == "text"
