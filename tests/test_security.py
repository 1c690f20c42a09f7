"""Hostile files: nothing is executed, nothing is allocated because a file says so, no name becomes a path."""

from __future__ import annotations

import ast
import copy
import io
import os
import pickle
import random
import runpy
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.federated.storage import checkpoint, safe_load
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.safe_load import load_plain

ROOT = Path(__file__).parents[1]
FUZZ = runpy.run_path(str(ROOT / "tests" / "stress" / "fuzz.py"))


@pytest.fixture(scope="module")
def calls():
    folder = ROOT / "lightning_sparsefl"
    return [
        (path.relative_to(folder).as_posix(), ast.unparse(node.func), node)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    ]


def test_everything_is_loaded_with_weights_only(calls):
    loads = [(path, node) for path, name, node in calls if name.endswith("torch.load")]
    assert loads
    for path, node in loads:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert options.get("weights_only") == "True", path


def test_arrays_are_loaded_without_pickle(calls):
    loads = [(path, node) for path, name, node in calls if name.endswith("np.load")]
    assert loads
    for path, node in loads:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert options.get("allow_pickle") == "False", path


def test_nothing_is_executed_or_unpickled(calls):
    forbidden = {
        *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "joblib.load"),
        *("numpy.load", "yaml.load", "yaml.unsafe_load", "torch.hub.load", "torch.jit.load"),
    }
    found = {(path, name) for path, name, _ in calls if name in forbidden}
    between_ranks = {("federated/distributed/ranks.py", "pickle.loads")}  # as `torch.distributed` does itself
    assert found == between_ranks


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "inside"
    folder.mkdir()
    return folder, FUZZ["make_targets"](folder)


CASES = {
    "message": 400,
    "message_known": 250,
    "update": 400,
    "order": 400,
    "answer": 400,
    "file": 250,
    "checkpoint": 120,
    "checkpoint_content": 30,
    "records": 60,
    "database": 100,
}


@pytest.mark.parametrize("name", CASES)
def test_changed_bytes_end_in_our_own_errors_or_are_read(name, targets):
    folder, known = targets
    before = sorted(folder.parent.rglob("*"))
    pick, found = random.Random(name), FUZZ["Found"]()
    with FUZZ["little_memory"]():
        for _ in range(CASES[name]):
            FUZZ["attempt"](name, known[name], pick, found)
    assert not found.strangers
    assert not found.hungry
    assert found.refused > 0
    assert sorted(folder.parent.rglob("*")) == before


# ---- archives


def archive(path, tree, *, compress=zipfile.ZIP_STORED, **records):
    """A file as ``torch.save`` writes it, with records of one's own."""
    saved = io.BytesIO()
    torch.save(tree, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w", compress) as target:
        for entry in source.infolist():
            leaf = entry.filename.partition("/")[2]
            target.writestr(entry.filename, records.get(leaf.replace(".", "_"), source.read(entry)))
    return path


class Calls:
    """A gadget: unpickled, it calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Storage:
    def __init__(self, count, kind=torch.FloatStorage):
        self.pid = ("storage", kind, "0", "cpu", count)


class Pickler(pickle._Pickler):
    def persistent_id(self, value):
        return value.pid if isinstance(value, Storage) else None


def pickled(tree):
    data = io.BytesIO()
    Pickler(data, 2).dump(tree)
    return data.getvalue()


def tensor(count, shape, stride, offset=0):
    return Calls(torch._utils._rebuild_tensor_v2, Storage(count), offset, shape, stride, False, {})


def nested(levels):
    tree = []
    for _ in range(levels):
        tree = [tree] * 10
    return tree


def endless():
    tree = []
    tree.append(tree)
    return tree


HOSTILE = {
    "a command": (Calls(os.system, "touch outside"), r"it asks for '(posix|nt)\.system'"),
    "a module": (Calls(__import__, "antigravity"), "it asks for '__builtin__.__import__'"),
    "memory by a number": (Calls(bytearray, 10**11), "it asks for '__builtin__.bytearray'"),
    "an empty tensor": (
        Calls(torch.Tensor, 10**11),
        r"it asks for 'torch\._tensor\.Tensor'|it asks for 'torch\.Tensor'",
    ),
    "a longer record": (tensor(10**9, (10**9,), (1,)), "a tensor has another length than its record"),
    "past the end": (tensor(4, (2, 4), (4, 1)), "a tensor reaches past its record"),
    "far offset": (tensor(4, (1,), (1,), 2**40), "a tensor reaches past its record"),
    "one value many times": (tensor(4, (10**9,), (0,)), "its tensors are much larger than the file"),
    "backwards": (tensor(4, (4,), (-1,)), "a tensor has a size or an offset that is not"),
    "lists of lists": (nested(9), "its values contain themselves or each other many times"),
    "a list of itself": (endless(), "its values contain themselves or each other many times"),
    "a far memo": (b"\x80\x02Nr\xff\xff\xff\xff.", None),
    "no pickle": (b"nonsense", "KeyError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_before_it_is_loaded(case, tmp_path, monkeypatch):
    tree, reason = HOSTILE[case]
    data = tree if isinstance(tree, bytes) else pickled({"state_dict": tree})
    path = archive(tmp_path / "last.ckpt", {"w": torch.ones(4)}, data_pkl=data)
    with FUZZ["little_memory"]():
        if reason is None:  # harmless here, since the memo is no array
            assert load_plain(path) is None
            return
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was loaded"))
        with pytest.raises(CheckpointMismatch, match=rf"damaged or not a checkpoint of plain types \(({reason})"):
            load_plain(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_hostile_archive_is_refused(tmp_path):
    tree = {"w": torch.zeros(10**6)}
    path = archive(tmp_path / "bomb.ckpt", tree, compress=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**5
    with pytest.raises(CheckpointMismatch, match="it is compressed"):
        load_plain(path)
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointMismatch, match="BadZipFile"):
        load_plain(path)
    write_atomically(path, tree)
    path.write_bytes(path.read_bytes() + b"PK\x05\x06" + bytes(18))  # a second table of contents, and an empty one
    with pytest.raises(CheckpointMismatch, match="damaged or not a checkpoint"):
        load_plain(path)


def rezipped(changes, *, first=(), last=()):
    """An archive of `{"x": 1}` with changed names of records, and more of them before and after."""
    saved, out = io.BytesIO(), io.BytesIO()
    torch.save({"x": 1}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(out, "w") as target:
        known = {changes.get(name, name): source.read(name) for name in source.namelist()}
        for name, data in (*first, *known.items(), *last):
            target.writestr(name, data)
    return out.getvalue()


OTHER = pickle.dumps({"x": 2}, protocol=2)
LAYOUTS = {
    "a suffix in capitals": rezipped({}, last=[("archive/data.PKL", OTHER)]),
    "capitals first": rezipped({}, first=[("archive/DATA.PKL", OTHER)]),
    "only capitals": rezipped({"archive/data.pkl": "archive/DATA.PKL"}),
    "another folder": rezipped({}, first=[("Archive/data.pkl", OTHER)]),
    "an unknown record": rezipped({}, last=[("archive/more", b"")]),
    "a script": rezipped({}, last=[("archive/constants.pkl", OTHER)]),
    "a number with a zero": rezipped({}, last=[("archive/data/00", b"")]),
    "a name with a NUL": rezipped({}, last=[("archive/data_pkl_", OTHER)]).replace(b"data_pkl_", b"data.pkl\0"),
    "a folder in a folder": rezipped({}, last=[("archive/archive/data.pkl", OTHER)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_cannot_be_shown_another_record(layout, tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    path.write_bytes(rezipped({}))
    assert load_plain(path) == {"x": 1}
    path.write_bytes(LAYOUTS[layout])
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was loaded"))
    with pytest.raises(CheckpointMismatch, match=r"not those that `torch.save` writes"):
        load_plain(path)


def test_a_legacy_file_with_an_archive_behind_it_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    torch.save({"x": Calls(bytearray, 10)}, path, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(io.BytesIO(rezipped({}))) as source, zipfile.ZipFile(path, "a") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert torch.load(path, weights_only=True) == {"x": bytearray(10)}  # torch looks at the front
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was loaded"))
    with pytest.raises(CheckpointMismatch, match="does not begin with a record"):
        load_plain(path)


def test_a_file_that_is_replaced_while_it_is_read_is_loaded_as_it_was_checked(tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    write_atomically(path, {"x": 1})
    checked = safe_load.require_plain

    def replaced(file):
        checked(file)
        write_atomically(path, {"x": 2})

    monkeypatch.setattr(safe_load, "require_plain", replaced)
    assert load_plain(path) == {"x": 1}
    assert load_plain(path) == {"x": 2}


@pytest.mark.skipif(os.name == "nt", reason="needs sparse files")
def test_a_checkpoint_may_be_larger_than_four_gigabytes(tmp_path):
    path = tmp_path / "x.ckpt"
    tree = {"a": torch.empty(2**32 + 8, dtype=torch.uint8), "b": torch.ones(2)}  # no page of `a` is ever touched
    with torch.serialization.skip_data():
        torch.save(tree, path)
    with path.open("rb") as file:
        safe_load.require_plain(file)


def test_what_we_write_is_read(tmp_path):
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.int64]
    tree = {
        "types": [torch.ones(3).to(dtype) for dtype in dtypes],
        "shapes": [torch.ones(()), torch.ones(0, 3), torch.arange(6.0).reshape(2, 3).T, torch.arange(9.0)[2:8:3]],
        "expanded": torch.ones(()).expand(1000, 1000),
        "plain": [None, True, -(2**70), 0.5, "x", (1, 2), {1: {"a": []}}],
        "mask": torch.rand(7, 5) < 0.5,
    }
    write_atomically(tmp_path / "x.pt", pack_plain(tree))
    found = load_plain(tmp_path / "x.pt")
    assert all(torch.equal(a, b) for a, b in zip(found["types"], tree["types"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found["shapes"], tree["shapes"], strict=True))
    assert found["expanded"].shape == (1000, 1000)
    assert found["plain"][:5] == tree["plain"][:5]


# ---- paths


def test_a_callbacks_state_cannot_delete_a_file_elsewhere(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    callback = ModelCheckpoint(folder, save_top_k=1, monitor="x")
    good = copy.deepcopy(callback.state_dict())
    checkpoint.load_callback(Path("last.ckpt"), callback, good)
    inside = good | {"last_model_path": str(folder / "deep" / "last.ckpt")}
    checkpoint.load_callback(Path("last.ckpt"), callback, inside)
    for state in (
        good | {"last_model_path": f"{folder}/../victim"},
        good | {"kth_best_model_path": str(victim)},
        good | {"best_k_models": {f"{folder}/../victim": torch.tensor(1.0)}},
    ):
        with pytest.raises(CheckpointMismatch, match=r"last\.ckpt names '.*victim', which is not in"):
            checkpoint.load_callback(Path("last.ckpt"), callback, state)
    with pytest.raises(CheckpointMismatch, match="is damaged, or of another version"):
        checkpoint.load_callback(Path("last.ckpt"), callback, [])
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "..", ""])
def test_names_and_rounds_of_a_checkpoint_become_no_paths(name, tmp_path, targets):
    folder, known = targets
    if "records" not in known:
        pytest.skip("a run keeps its records elsewhere")
    read, good = known["checkpoint"].read, torch.load(io.BytesIO(known["checkpoint"].seeds[0]), weights_only=True)
    before = sorted(folder.parent.rglob("*"))
    for change in ("index", "mask"):
        content = copy.deepcopy(good)
        if change == "index":
            index = content["sparsefl"]["server records"]["index"]
            content["sparsefl"]["server records"]["index"] = {key: {1: [name, name]} for key in index}
        else:
            content["sparsefl"]["state"]["masks"][name] = pack_plain(torch.ones(3, dtype=torch.bool))
        data = io.BytesIO()
        torch.save(content, data)
        with pytest.raises(CheckpointMismatch if change == "index" else ValueError, match=r"last\.ckpt"):
            read(data.getvalue())
    assert sorted(folder.parent.rglob("*")) == before
