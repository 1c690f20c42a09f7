"""Split data in files that processes map into memory: the same examples, and no stale or damaged file is used."""

import gc
import json
from dataclasses import dataclass, fields

import pytest
import torch

from lightning_sparsefl import FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.data import Dirichlet, FederatedBlobs, FederatedBlobsOnDemand, FederatedDataset, Partition
from lightning_sparsefl.data.memory_map import map_split, write_split
from lightning_sparsefl.errors import DataNotFound, InvalidOption
from lightning_sparsefl.models import MLP


def blobs(folder=None, **options):
    settings = {"num_clients": 6, "num_classes": 4, "dim": 64, "val_fraction": 0.2, "partition": Dirichlet(alpha=1.0)}
    return FederatedBlobs(memory_map=None if folder is None else str(folder), **{**settings, **options})


def same(first, second):
    for field in fields(first):
        pair = [getattr(held, field.name) for held in (first, second)]
        if pair[0] is None:
            assert pair[1] is None
            continue
        for one, other in zip(*(value if isinstance(value, tuple) else (value,) for value in pair), strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other), field.name
    return True


@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.0, "eval_split": "test"}])
def test_the_examples_are_those_of_a_copy(tmp_path, options):
    copied, mapped = blobs(**options), blobs(tmp_path / "new" / "folder", **options)
    mapped.prepare_data()
    for data in (copied, mapped):
        data.setup()
    assert same(copied._held, mapped._held)
    assert mapped.client_sizes == copied.client_sizes
    for one, other in zip(copied.client_test_dataloader(2), mapped.client_test_dataloader(2), strict=True):
        assert all(map(torch.equal, one, other))


class HalfBlobs(FederatedBlobs):
    def load(self):
        inputs, labels, test_inputs, test_labels = super().load()
        return inputs.bfloat16(), labels, test_inputs.bfloat16(), test_labels


def test_a_type_that_numpy_lacks_is_refused(tmp_path):
    data = HalfBlobs(num_clients=3, memory_map=str(tmp_path))
    with pytest.raises(InvalidOption, match=r"`data\.memory_map` is .*, and NumPy has no torch\.bfloat16; "):
        data.prepare_data()


def test_a_change_stays_in_this_process(tmp_path):
    data = blobs(tmp_path)
    data.prepare_data()
    data.setup()
    before = data._held.train[0].clone()
    data._held.train[0].zero_()
    again = blobs(tmp_path)
    again.setup()
    assert torch.equal(again._held.train[0], before)


def test_equal_arrays_are_written_once_and_kept(tmp_path):
    blobs(tmp_path).prepare_data()
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    blobs(tmp_path).prepare_data()
    blobs(tmp_path, batch_size=7).prepare_data()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")} == files
    assert len(list(tmp_path.glob("FederatedBlobs-*.json"))) == 2
    assert not list(tmp_path.glob(".*"))


def test_other_options_are_another_split(tmp_path):
    blobs(tmp_path).prepare_data()
    with pytest.raises(DataNotFound, match=r"`data\.memory_map` is .*call it first"):
        blobs(tmp_path, num_clients=5).setup()
    with pytest.raises(DataNotFound, match="memory_map"):
        blobs(tmp_path, seed=1).setup()


@dataclass(frozen=True)
class Blocks(Partition):
    """Consecutive examples, as many as a tensor says."""

    sizes: torch.Tensor

    def assign(self, labels, num_clients, rng):
        return list(torch.arange(len(labels)).split(self.sizes.tolist()))


def halves(first):
    """As many sizes as PyTorch abbreviates in a text, which differ in the middle."""
    sizes = torch.ones(2000, dtype=torch.int64)
    sizes[1000], sizes[1001] = first, 100 - first
    return blobs_of(Blocks(sizes))


def blobs_of(partition):
    return {"num_clients": 2000, "num_train": 2098, "partition": partition, "val_fraction": 0.0, "eval_split": "test"}


def test_runs_with_other_tensors_in_a_partition_share_a_folder(tmp_path):
    runs = [blobs(tmp_path, **halves(first)) for first in (30, 70)]
    for data in runs:
        data.prepare_data()
    for data in runs:
        data.setup()
    assert [data.client_sizes[1000] for data in runs] == [30, 70]


class Unknown(Partition):
    """A partition that is not a dataclass."""

    def __init__(self, first):
        self.first = first

    def assign(self, labels, num_clients, rng):
        return list(torch.arange(len(labels)).split([self.first, len(labels) - self.first]))


def test_an_option_that_does_not_name_a_split_is_refused(tmp_path):
    options = {**blobs_of(Unknown(100)), "num_clients": 2}
    for method in (FederatedBlobs.prepare_data, FederatedBlobs.setup):
        with pytest.raises(InvalidOption, match=r"`data\.partition` is a Unknown, .* `data\.memory_map` to null"):
            method(blobs(tmp_path, **options))
    assert list(tmp_path.iterdir()) == []
    blobs(**options).setup()


def test_an_attribute_with_an_underscore_does_not_name_a_split(tmp_path):
    data = blobs(tmp_path)
    data.prepare_data()
    data._cache = Unknown(100)
    data.setup()


def test_data_that_has_changed_replaces_a_stale_file(tmp_path, monkeypatch):
    blobs(tmp_path).prepare_data()
    load = FederatedBlobs.load
    monkeypatch.setattr(FederatedBlobs, "load", lambda self: (load(self)[0] + 1, *load(self)[1:]))
    fresh = blobs(tmp_path)
    fresh.prepare_data()
    fresh.setup()
    assert same(fresh._held, fresh._split(*fresh.load()))


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_damaged_file_is_written_again(tmp_path, cut):
    whole = blobs(tmp_path)
    whole.prepare_data()
    for path in tmp_path.glob("*.npy"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content if cut == -1 else content[:cut])
    whole.prepare_data()
    whole.setup()
    gc.collect()
    copied = blobs()
    copied.setup()
    assert same(whole._held, copied._held)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"train.0": 3}', json.dumps({"train.0": "../secret"}), json.dumps({"train.0": "0" * 64})],
)
def test_a_wrong_list_is_refused_by_name(tmp_path, content):
    data = blobs(tmp_path)
    data.prepare_data()
    (path,) = tmp_path.glob("*.json")
    path.write_text(content)
    with pytest.raises(DataNotFound, match=path.name):
        data.setup()


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    import numpy as np

    data = blobs(tmp_path)
    data.prepare_data()
    (path,) = tmp_path.glob("*.json")
    digest = json.loads(path.read_text())["train.0"]
    np.save(tmp_path / f"{digest}.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataNotFound, match="memory_map"):
        data.setup()


def test_data_without_one_split_has_no_files(tmp_path):
    pair = torch.utils.data.TensorDataset(torch.zeros(40, 8), torch.arange(40) % 4)
    with pytest.raises(InvalidOption, match=r"`data\.memory_map` is .*null"):
        FederatedDataset(pair, pair, num_clients=2, memory_map=str(tmp_path))
    with pytest.raises(InvalidOption, match=r"`data\.memory_map`"):
        FederatedBlobsOnDemand(memory_map=str(tmp_path))


def test_empty_parts_and_views_are_kept(tmp_path):
    held = blobs()
    held.setup()
    part = held._held
    turned = type(part)(**{**vars(part), "train": (part.train[0].transpose(0, -1), part.train[1][:0])})
    write_split(turned, tmp_path, "turned")
    assert same(map_split(tmp_path, "turned"), turned)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_leaves_the_bytes_of_one_with_copies(tmp_path, devices):
    states = []
    for folder in (None, tmp_path / "files"):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            algorithm=FedSpa(),
            federation=Federation(clients_per_round=4, pictures_every_n_rounds=0),
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=2,
            default_root_dir=str(tmp_path / ("copied" if folder is None else "mapped")),
            logger=False,
            enable_progress_bar=False,
            seed=0,
        )
        trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 64)), blobs(folder))
        states.append(torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert list((tmp_path / "files").glob("*.npy"))
