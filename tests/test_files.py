"""Files that are replaced as a whole or not at all, next to other people's links and in any kind of folder."""

import ast
import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from lightning_sparsefl import files
from lightning_sparsefl.callbacks.spawned import ReturnedState
from lightning_sparsefl.data.memory_map import write_split
from lightning_sparsefl.data.split import SplitData
from lightning_sparsefl.federated.storage.atomic_files import (
    write_atomically,
    write_bytes_atomically,
    write_text_atomically,
)
from lightning_sparsefl.files import remove_leftovers, replacing
from lightning_sparsefl.wire import export_sparse

PACKAGE = Path(files.__file__).parent
ENDINGS = (".tmp", ".part", ".temp", ".bak", ".partial")
"""Endings of the names of temporary files."""


def split(folder):
    rows = torch.arange(4)
    part = (rows, rows)
    held = SplitData(
        train=part, train_stops=rows, val=part, val_stops=None, test=part, test_indices=rows, test_stops=rows
    )
    write_split(held, folder, "x")


def state(folder):
    returned = ReturnedState.__new__(ReturnedState)
    returned.path = str(folder / "x")
    returned.send({"a": 1})


WRITERS = {
    "torch.save": lambda folder: write_atomically(folder / "x", {"a": 1}),
    "bytes": lambda folder: write_bytes_atomically(folder / "x", b"1"),
    "text": lambda folder: write_text_atomically(folder / "x", "1"),
    "sparse weights": lambda folder: export_sparse({"a": torch.ones(3)}, folder / "x"),
    "a split": split,
    "a state": state,
}


def written(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(tmp_path, writer):
    WRITERS[writer](tmp_path / "first")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "second"
    folder.mkdir()
    for name in written(tmp_path / "first"):
        (folder / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
    WRITERS[writer](folder)
    assert written(folder) == written(tmp_path / "first")
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("writer", WRITERS)
def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, writer, monkeypatch):
    events, sync, replace = [], os.fsync, Path.replace

    def note_sync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def note_replace(path, target):
        events.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    WRITERS[writer](tmp_path)
    assert events == ["file", "name", "folder"] * len(written(tmp_path))


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_left_of_a_write_that_fails(tmp_path, writer, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[writer](tmp_path)
    assert written(tmp_path) == set()


@pytest.mark.parametrize("links", [True, False])
def test_the_replaced_file_is_kept_under_a_second_name(tmp_path, links, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path, keep = tmp_path / "x", tmp_path / "before"
    for text in (b"1", b"2", b"3"):
        with replacing(path, keep=keep) as file:
            file.write(text)
    assert (path.read_bytes(), keep.read_bytes()) == (b"3", b"2")


def test_a_replacement_that_was_killed_after_its_link_leaves_no_file_when_it_is_made_again(tmp_path):
    path, keep = tmp_path / "x", tmp_path / "before"
    path.write_bytes(b"1")
    os.link(path, keep)
    with replacing(path, keep=keep) as file:
        file.write(b"2")
    assert (path.read_bytes(), keep.read_bytes()) == (b"2", b"1")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["before", "x"]
    assert written(tmp_path) == {"x", "before"}


def test_the_permissions_are_those_of_the_umask_or_fewer(tmp_path):
    before = os.umask(0o022)
    try:
        for mode, name in ((0o666, "open"), (0o600, "private")):
            with replacing(tmp_path / name, mode=mode):
                pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "private")] == [0o644, 0o600]


def test_a_folder_that_cannot_be_opened_is_not_synced(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, *rest, **options):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with replacing(tmp_path / "x") as file:
        file.write(b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_leftovers_are_deleted_and_nothing_else(tmp_path):
    for name in (".x.12.tmp", "x.tmp", ".hidden", "x"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert written(tmp_path) == {"x.tmp", ".hidden", "x"}


def names_of_temporary_files(source):
    """Texts of a source file that end as the names of temporary files do."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.endswith(ENDINGS)]


def test_no_other_module_has_temporary_files_of_its_own():
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if (names := names_of_temporary_files(path.read_text(encoding="utf-8")))
    }
    assert set(found) == {"files.py"}


def test_a_planted_temporary_file_is_caught():
    assert names_of_temporary_files('path.with_name(f".{path.name}.{os.getpid()}.tmp")') == [".tmp"]
