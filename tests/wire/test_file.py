from __future__ import annotations

import errno
import json
import os
import struct

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.wire import dense, export_sparse, file, load_sparse
from lightning_sparsefl.wire.file import _FORMAT


def bits(value):
    return value.reshape(-1).contiguous().view(torch.uint8)


def same(a, b):
    assert list(a) == list(b)
    for name, value in a.items():
        assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bits(value), bits(b[name])), name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "weights.safetensors"


@pytest.mark.parametrize("dtype", dense.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3,), (2, 0, 5), (40, 50), (3, 7, 5, 11)])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_every_type_survives_bit_for_bit(dtype, shape, density, path):
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=rng).mul(50).to(dtype) * (torch.rand(shape, generator=rng) < density)
    export_sparse({"w": values}, path)
    same(load_sparse(path), {"w": values})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_signs_of_zero_and_of_nothing_survive(dtype, path):
    values = torch.zeros(50, 40, dtype=dtype)
    values[::7, ::3] = torch.tensor([-0.0, float("nan"), float("inf"), float("-inf"), 1, 2, 3, 4], dtype=dtype)[:, None]
    quiet = {torch.float32: 0x7FC00123, torch.float64: 0x7FF8000000000123}.get(dtype)
    if quiet is not None:  # a NaN of somebody's own
        values.view(torch.int32 if dtype == torch.float32 else torch.int64)[3, 3] = quiet
    export_sparse({"w": values}, path)
    assert path.stat().st_size < values.nbytes
    same(load_sparse(path), {"w": values})


def test_a_module_with_buffers_and_tied_weights(path):
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    net[2].weight = net[0].weight
    with torch.no_grad():
        net[0].weight[torch.rand(64, 64) < 0.9] = 0
    export_sparse(net, path)
    loaded = load_sparse(path)
    same(loaded, dict(net.state_dict()))
    net.load_state_dict(loaded, strict=True)
    assert all(value.is_contiguous() and not value.requires_grad for value in loaded.values())


def test_a_state_dict_keeps_the_versions_of_its_modules(path):
    state = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).state_dict()
    export_sparse(state, path)
    assert load_sparse(path)._metadata == state._metadata
    export_sparse(dict(state), path)
    assert type(load_sparse(path)) is dict


@pytest.mark.parametrize("versions", ["[]", '{"0": "2"}', '{"0": true}'])
def test_versions_that_are_no_numbers_are_refused(versions, path):
    path.parent.mkdir()
    save_file({"a": torch.ones(1)}, path, {"format": _FORMAT, "tensors": '{"a": null}', "versions": versions})
    with pytest.raises(CheckpointMismatch, match="has versions of modules that are not whole numbers"):
        load_sparse(path)


def test_a_compiled_module_has_the_names_of_the_plain_one(path):
    net = nn.Sequential(nn.Linear(4, 3))
    export_sparse(torch.compile(net, backend="eager"), path)
    same(load_sparse(path), dict(net.state_dict()))


@pytest.mark.parametrize("density", [0.0, 0.05, 0.2, 0.5, 0.96, 0.98, 1.0])
def test_the_file_is_as_small_as_it_can_be(density, path):
    values = torch.ones(100, 100)
    values.view(-1)[: round((1 - density) * 10000)] = 0
    export_sparse({"w": values}, path)
    best = min(40000, 1250 + round(density * 10000) * 4)
    assert best < path.stat().st_size < best + 500
    same(load_sparse(path), {"w": values})


def test_views_are_written_as_they_look(path):
    whole = torch.arange(64.0).reshape(8, 8)
    tree = {"t": whole.T, "row": whole[3], "strided": torch.zeros(80, 80)[:, ::2], "p": nn.Parameter(whole)}
    export_sparse(tree, path)
    same(load_sparse(path), {name: value.detach() for name, value in tree.items()})


def test_names_are_no_paths(path):
    tree = {"../../up": torch.eye(50), "/tmp/x": torch.ones(2), "": torch.ones(1), "a b\n": torch.zeros(90)}
    export_sparse(tree, path)
    same(load_sparse(path), tree)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_is_loaded_outlives_the_file(path):
    tree = {"dense": torch.arange(1.0, 9.0), "sparse": torch.eye(64)}
    export_sparse(tree, path)
    loaded = load_sparse(path)
    path.write_bytes(b"")
    same(loaded, tree)


def test_a_full_disk_is_an_error_of_the_operating_system(path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(file, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        export_sparse({"w": torch.ones(3)}, path)
    assert raised.value.errno == errno.ENOSPC
    assert list(path.parent.iterdir()) == []


def test_a_link_at_the_name_of_the_temporary_file_is_not_followed(path):
    path.parent.mkdir()
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name(f".{path.name}.{os.getpid()}.tmp").symlink_to(victim)
    export_sparse({"w": torch.ones(3)}, path)
    assert victim.read_text() == "precious"
    same(load_sparse(path), {"w": torch.ones(3)})


def test_an_older_file_stays_where_writing_fails(path, monkeypatch):
    export_sparse({"w": torch.ones(3)}, path)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        export_sparse({"w": torch.zeros(3)}, path)
    assert load_sparse(path)["w"].tolist() == [1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"note": {"a": 1}}, "`note` is a dict; expected a tensor, so remove it"),
        ({"z": torch.ones(2, dtype=torch.complex64)}, "`z` is a torch.strided tensor of torch.complex64 on cpu"),
        ({"m": torch.ones(2, device="meta")}, "on meta; expected a dense tensor"),
        ({"s": torch.eye(2).to_sparse()}, "`s` is a torch.sparse_coo tensor"),
        ({"q": torch.ones(2).to(torch.float8_e4m3fn)}, "float8_e4m3fn on cpu; .* of the types bfloat16, bool, float16"),
        ({"w#mask": torch.ones(2)}, "The name `w#mask` is reserved"),
        ({"__metadata__": torch.ones(2)}, "The name `__metadata__` is reserved"),
        ("net.ckpt", "`weights` is a str; expected a module, or a mapping of tensors"),
    ],
)
def test_what_cannot_be_written_is_refused(tree, message, path):
    with pytest.raises(InvalidOption, match=message):
        export_sparse(tree, path)
    assert not path.exists()


class Scale(nn.Module):
    def get_extra_state(self):
        return {"factor": 2.0}


def test_extra_state_is_refused_with_a_remedy(path):
    expected = r"`0._extra_state`, the extra state of a module, is a dict.*; pass the `state_dict` without it"
    with pytest.raises(InvalidOption, match=expected):
        export_sparse(nn.Sequential(Scale()), path)
    export_sparse({"a_extra_state": torch.ones(1)}, path)


@pytest.fixture
def content(path):
    """The bytes of a file with a dense, a sparse and an empty tensor."""
    export_sparse({"d": torch.ones(3), "s": torch.eye(64), "e": torch.zeros(0, 2), "n": torch.tensor(3)}, path)
    return path.read_bytes()


def test_a_file_cut_anywhere_is_refused(path, content):
    for end in [*range(64), *range(64, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointMismatch, match="is truncated or not a safetensors file"):
            load_sparse(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointMismatch, match="is truncated"):
        load_sparse(path)


def test_a_broken_byte_in_the_header_ends_in_our_error_or_in_tensors(path, content):
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for at in range(header):
        broken = bytearray(content)
        broken[at] ^= (1, 16, 128)[at % 3]
        path.write_bytes(broken)
        try:
            loaded = load_sparse(path)
        except CheckpointMismatch:
            continue
        assert sum(value.nbytes for value in loaded.values()) <= 64 * len(content)


def test_a_missing_or_foreign_file_is_refused(path, tmp_path):
    with pytest.raises(
        CheckpointMismatch, match="does not exist or is not a file; expected a file that `export_sparse`"
    ):
        load_sparse(path)
    with pytest.raises(
        CheckpointMismatch, match="does not exist or is not a file; expected a file that `export_sparse`"
    ):
        load_sparse(tmp_path)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": torch.ones(2)}, foreign)
    with pytest.raises(
        CheckpointMismatch, match=r"has the format None instead of .*; expected a file that `export_sparse`"
    ):
        load_sparse(foreign)
    torch.save({"w": torch.ones(2)}, foreign)
    with pytest.raises(CheckpointMismatch, match="is truncated or not a safetensors file"):
        load_sparse(foreign)


EYE = {"w": torch.ones(8), "w#mask": torch.full((8,), 0b00000001, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("shapes", "entries", "message"),
    [
        ({"w": [8, 8]}, EYE | {"more": torch.ones(1)}, "does not contain exactly the tensors that its header lists"),
        ({"w": None}, EYE, "does not contain exactly the tensors"),
        ({"v": None}, {"w": torch.ones(1)}, "does not contain exactly the tensors"),
        ({"w": [8, 9]}, EYE, r"has a mask of `w` that does not match its shape \[8, 9\]"),
        ({"w": [2**40, 2**40]}, EYE, "does not match its shape"),
        ({"w": [-8, -8]}, EYE, "does not match its shape"),
        ({"w": [0, 2**70]}, EYE, "does not match its shape"),
        ({"w": [8, 8]}, EYE | {"w": torch.ones(2, 4)}, "does not match its shape"),
        ({"w": [8, 8]}, EYE | {"w#mask": torch.ones(8)}, "does not match its shape"),
        ({"w": [8, 8]}, EYE | {"w": torch.ones(7)}, "has 7 values of `w`, but its mask keeps another number"),
        ({"w": [8, 8] + [1] * 63}, EYE, "has 65 dimensions of `w`, where torch computes with at most 64"),
        ({"w": [10**9] * 200_000}, EYE, "has 200000 dimensions of `w`"),
        ({"w": [8.0, 8.0]}, EYE, "is truncated"),
        ({"w": "8"}, EYE, "is truncated"),
        ([["w"]], EYE, "is truncated"),
        ({"w": []}, {"w": torch.ones(1)}, "is truncated"),
    ],
)
def test_a_header_that_lies_is_refused(shapes, entries, message, path):
    path.parent.mkdir()
    save_file(entries, path, {"format": _FORMAT, "tensors": json.dumps(shapes)})
    with pytest.raises(CheckpointMismatch, match=message):
        load_sparse(path)


def test_the_twin_of_the_lies_is_read(path):
    path.parent.mkdir()
    save_file(EYE, path, {"format": _FORMAT, "tensors": json.dumps({"w": [8, 8]})})
    expected = torch.zeros(8, 8)
    expected[:, 0] = 1
    assert torch.equal(load_sparse(path)["w"], expected)
