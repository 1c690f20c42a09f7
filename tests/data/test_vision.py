"""The image sets: on small files of the published layout, and (marked ``data``) on the real ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision

from lightning_sparsefl.data import (
    FederatedCIFAR10,
    FederatedCIFAR100,
    FederatedEMNISTLetters,
    FederatedFashionMNIST,
    FederatedMNIST,
    FederatedTinyImageNet,
    Pathological,
)
from lightning_sparsefl.errors import DataNotFound, InvalidOption

ALL = [FederatedMNIST, FederatedFashionMNIST, FederatedEMNISTLetters, FederatedCIFAR10, FederatedCIFAR100]


def write_idx(path: Path, array: np.ndarray) -> None:
    """The format of the MNIST family: magic number, big-endian sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4")
    path.write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str, files: list[str], first_label: int, classes: int) -> np.ndarray:
    """60 training and 20 test images; returns the training images as they lie in the file."""
    rng = np.random.default_rng(0)
    stored = {}
    for part, count in (("train", 60), ("test", 20)):
        stored[part] = rng.integers(0, 256, (count, 28, 28))
        images, labels = (name for name in files if name.startswith(part))
        write_idx(root / folder / images.partition(":")[2], stored[part])
        write_idx(root / folder / labels.partition(":")[2], first_label + np.arange(count) % classes)
    return stored["train"]


MNIST_FILES = [
    "train:train-images-idx3-ubyte",
    "train:train-labels-idx1-ubyte",
    "test:t10k-images-idx3-ubyte",
    "test:t10k-labels-idx1-ubyte",
]
EMNIST_FILES = [
    f"{part}:emnist-letters-{part}-{kind}-ubyte"
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
]


@pytest.mark.parametrize(
    ("data_class", "folder"), [(FederatedMNIST, "MNIST/raw"), (FederatedFashionMNIST, "FashionMNIST/raw")]
)
def test_mnist_files(data_class, folder: str, tmp_path: Path):
    stored = write_mnist(tmp_path, folder, MNIST_FILES, first_label=0, classes=10)
    data = data_class(root=str(tmp_path), num_clients=6)
    images, labels, test_images, test_labels = data.load()
    assert images.dtype == torch.uint8
    assert np.array_equal(images[:, 0].numpy(), stored)
    assert labels.tolist() == [*range(10)] * 6
    assert (len(test_images), len(test_labels)) == (20, 20)
    data.setup()
    assert data.client_sizes == [10] * 6
    (inputs, _), *_ = data.client_train_dataloader(0)
    assert (inputs.shape, inputs.dtype) == ((10, 1, 28, 28), torch.float32)


def test_emnist_letters_are_upright_and_count_from_zero(tmp_path: Path):
    stored = write_mnist(tmp_path, "EMNIST/raw", EMNIST_FILES, first_label=1, classes=26)
    images, labels, _, test_labels = FederatedEMNISTLetters(root=str(tmp_path)).load()
    assert np.array_equal(images[:, 0].numpy(), stored.transpose(0, 2, 1))
    assert labels.tolist() == [i % 26 for i in range(60)]
    assert set(test_labels.tolist()) == set(range(20))


@pytest.fixture(params=[(FederatedCIFAR10, "labels", 10), (FederatedCIFAR100, "fine_labels", 100)], ids=["10", "100"])
def small_cifar(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A data module over files of CIFAR's layout with 200 images each, and the pixels of the first file."""
    data_class, key, classes = request.param
    source = getattr(torchvision.datasets, data_class.source)
    folder = tmp_path / source.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    names = [name for name, _ in source.train_list + source.test_list]
    pixels = {name: rng.integers(0, 256, (200, 3072), dtype=np.uint8) for name in names}
    for name in names:
        content = {"data": pixels[name], key: (np.arange(200) % classes).tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / source.meta["filename"]).write_bytes(pickle.dumps({source.meta["key"]: [str(c) for c in range(classes)]}))
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(source, part, [[name, None] for name, _ in getattr(source, part)])
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": None})
    return data_class(root=str(tmp_path), num_clients=4), pixels[names[0]], classes


def test_cifar_files(small_cifar):
    data, pixels, classes = small_cifar
    images, labels, test_images, _ = data.load()
    assert np.array_equal(images[:200].numpy(), pixels.reshape(-1, 3, 32, 32))
    assert labels[:200].tolist() == [i % classes for i in range(200)]
    assert test_images.shape == (200, 3, 32, 32)
    data.setup()
    assert data.num_classes == classes
    (inputs, _), *_ = data.client_train_dataloader(0)
    assert (inputs.shape, inputs.dtype) == ((32, 3, 32, 32), torch.float32)


def test_cifar_is_augmented_in_training_only(small_cifar):
    data, *_ = small_cifar
    assert data.transform(train=True)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 3, 32, 32)
    image = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    assert not torch.equal(data.transform(train=True)(image), data.transform(train=False)(image))


@pytest.mark.parametrize("data_class", ALL)
def test_missing_data_is_one_sentence_with_both_remedies(data_class, tmp_path: Path):
    data = data_class(root=str(tmp_path))
    data.prepare_data()
    with pytest.raises(DataNotFound) as caught:
        data.setup()
    message = str(caught.value)
    assert str(tmp_path / data_class.folder) in message
    assert "`--data.root <folder>`" in message
    assert "`--data.download true`" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data_class", ALL)
def test_only_download_downloads(data_class, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    source = getattr(torchvision.datasets, data_class.source)
    monkeypatch.setattr(source, "__init__", lambda self, root, **options: asked.append((root, options["download"])))
    data_class(root=str(tmp_path)).prepare_data()
    assert asked == []
    data_class(root=str(tmp_path), download=True).prepare_data()
    assert asked == [(str(tmp_path), True)]


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("size", [0, 3, 10, 16, 1000])
def test_a_damaged_file_is_refused_with_its_folder(size: int, download: bool, tmp_path: Path):
    """Torchvision does not replace a file that exists."""
    write_mnist(tmp_path, "MNIST/raw", MNIST_FILES, first_label=0, classes=10)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:size])
    data = FederatedMNIST(root=str(tmp_path), download=download)
    with pytest.raises(DataNotFound, match=rf"{path.parent}.* \(.+\); .*, or delete this folder and download the data"):
        (data.prepare_data if download else data.setup)()


@pytest.mark.parametrize("data_class", [*ALL, FederatedTinyImageNet])
def test_a_failed_download_names_the_data_and_the_cause(data_class, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args, **options):
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    expected = rf"`{data_class.__name__}` found no .* {tmp_path / data_class.folder}, and downloaded none .*no network"
    with pytest.raises(DataNotFound, match=expected):
        data_class(root=str(tmp_path), download=True).prepare_data()


@pytest.mark.parametrize("data_class", ALL)
def test_nominal_sizes_are_the_papers(data_class):
    sizes = {FederatedEMNISTLetters: 1248, FederatedCIFAR10: 500, FederatedCIFAR100: 500}
    assert set(data_class().client_sizes) == {sizes.get(data_class, 600)}


@pytest.mark.data
@pytest.mark.parametrize(
    ("data_class", "num_test"),
    [
        (FederatedMNIST, 10_000),
        (FederatedFashionMNIST, 10_000),
        (FederatedEMNISTLetters, 20_800),
        (FederatedCIFAR10, 10_000),
    ],
)
def test_the_real_sets(data_class, num_test: int, data_root: Path):
    data = data_class(root=str(data_root), partition=Pathological(classes_per_client=5))
    images, labels, test_images, _ = data.load()
    assert images.shape == (data.num_train, *data.sample_shape)
    assert len(test_images) == num_test
    even = [data.num_train // data.num_classes] * data.num_classes
    assert (labels.bincount().tolist() == even) == (data_class is not FederatedMNIST)
    inputs = data.transform(train=False)(images)
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0.0] * len(data.mean), abs=0.002)
    assert inputs.std((0, 2, 3)).tolist() == pytest.approx([1.0] * len(data.mean), abs=0.002)
    data.setup()
    assert sum(data.client_sizes) == data.num_train
    assert int((data.client_label_counts(0) > 0).sum()) == 5


@pytest.mark.data
def test_a_real_letter_l_stands_upright(data_root: Path):
    """Averaged, the ink of I and L is taller than wide; lying down it would be the other way round."""
    images, labels, *_ = FederatedEMNISTLetters(root=str(data_root)).load()
    ink = images[(labels == 8) | (labels == 11)].float().mean((0, 1))
    assert ink.sum(1).gt(ink.sum(1).max() / 4).sum() > ink.sum(0).gt(ink.sum(0).max() / 4).sum()


@pytest.mark.parametrize("data_class", ALL)
@pytest.mark.parametrize(("normalization", "low", "high"), [("half", -1.0, 1.0), ("unit", 0.0, 1.0)])
def test_inputs_can_be_scaled_to_a_range_instead(data_class, normalization, low, high):
    """Torchvision's `Normalize(.5, .5)` after `ToTensor`, and `ToTensor` alone."""
    channels = data_class.sample_shape[0]
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, channels, 1, 1)
    data = data_class(normalization=normalization, augment=False)
    for train in (True, False):
        darkest, brightest = data.transform(train=train)(pixels)
        assert darkest.flatten().tolist() == pytest.approx([low] * channels, abs=1e-6)
        assert brightest.flatten().tolist() == pytest.approx([high] * channels, abs=1e-6)
    assert not torch.equal(data_class().transform(train=False)(pixels), data.transform(train=False)(pixels))


@pytest.mark.parametrize("data_class", [FederatedCIFAR10, FederatedCIFAR100])
def test_augmentation_can_be_left_out(data_class):
    image = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    data = data_class(augment=False)
    assert torch.equal(data.transform(train=True)(image), data.transform(train=False)(image))


def test_an_unknown_normalization_is_named():
    with pytest.raises(InvalidOption, match=r"`data\.normalization` is 'whiten'; expected one of dataset, half, unit"):
        FederatedMNIST(normalization="whiten")
