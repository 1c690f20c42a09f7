"""Image data sets that are read by torchvision: MNIST, Fashion-MNIST, EMNIST and CIFAR."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from urllib.error import URLError

import torch
from torch import Tensor

from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.errors import DataNotFound, require

Normalization: TypeAlias = Literal["dataset", "half", "unit"]
"""How images are scaled: to the mean 0 and standard deviation 1 of the data set, to [-1, 1], or to [0, 1]."""


class FromTorchvision(FederatedDataModule):
    """Base class of image data sets in torchvision's folder layout.

    Args:
        root: Folder to which torchvision downloads.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` subtracts the mean of the data set and divides by its standard
            deviation, ``"half"`` maps to [-1, 1], ``"unit"`` to [0, 1].
        augment: Whether training images are cropped and flipped at random, in the data sets that do so (CIFAR).
        options: Further arguments of :class:`FederatedDataModule`.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    source: str
    """Name of the class in ``torchvision.datasets``."""
    folder: str
    """Subfolder of `root` that contains the data set."""

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        *,
        normalization: Normalization = "dataset",
        augment: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        known = get_args(Normalization)
        require(normalization in known, "data.normalization", normalization, f"one of {', '.join(known)}")
        self.root, self.download = os.path.expanduser(root), download
        self.normalization, self.augment = normalization, augment
        if normalization != "dataset":
            mean, std = (0.5, 0.5) if normalization == "half" else (0.0, 1.0)
            self.mean, self.std = (mean,) * len(self.mean), (std,) * len(self.std)
        if not augment:
            self.crop_padding = None

    def prepare_data(self) -> None:
        """Download the data set if `download` is set, and write the files of `memory_map`.

        Raises:
            DataNotFound: If the download fails, or a file that is already there is damaged.
        """
        if self.download:
            self._read(train=True, download=True)
        super().prepare_data()

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load the images, uint8 of shape (examples, channels, height, width), and the labels.

        Raises:
            DataNotFound: If the data set, or a part of it, is not in `root`, or a file is damaged.
        """
        train, test = (self._read(train=train, download=False) for train in (True, False))
        return *self.tensors(train), *self.tensors(test)

    def _read(self, *, train: bool, download: bool) -> Any:
        """Create the torchvision data set, and say what to do if that fails."""
        try:
            return self.read(train=train, download=download)
        except (RuntimeError, ValueError, AssertionError, FileNotFoundError, URLError) as error:
            where = Path(self.root).absolute() / self.folder
            reason = " ".join(str(error).split()).partition(". ")[0] or "a file is damaged"
            # a download leaves files alone that exist, even if they are damaged
            remedy = "delete this folder and download" if where.exists() else "download"
            raise DataNotFound(
                f"`{type(self).__name__}` found no complete copy of its data in {where}"
                f"{', and downloaded none' if download else ''} ({reason}); set another folder with "
                f"`--data.root <folder>`, or {remedy} the data with `--data.download true`."
            ) from None

    def read(self, *, train: bool, download: bool, **arguments: Any) -> Any:
        """Create the torchvision data set."""
        import torchvision  # a slow import, which `--help` should not wait for

        return getattr(torchvision.datasets, self.source)(self.root, train=train, download=download, **arguments)

    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Return the images, with the channels first, and the labels."""
        images = torch.as_tensor(dataset.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(dataset.targets)


class FederatedMNIST(FromTorchvision):
    """MNIST: 60,000 handwritten digits of 28x28 pixels (LeCun et al., 1998).

    Args:
        root: Folder that contains ``MNIST/raw``.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random; without effect on this set.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 10, (1, 28, 28), 60_000
    mean, std = (0.1307,), (0.3081,)
    source, folder = "MNIST", "MNIST/raw"


class FederatedFashionMNIST(FromTorchvision):
    """Fashion-MNIST: 60,000 images of clothing of 28x28 pixels (Xiao et al., 2017).

    Args:
        root: Folder that contains ``FashionMNIST/raw``.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random; without effect on this set.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 10, (1, 28, 28), 60_000
    mean, std = (0.2860,), (0.3530,)
    source, folder = "FashionMNIST", "FashionMNIST/raw"


class FederatedEMNISTLetters(FromTorchvision):
    """EMNIST Letters: 124,800 handwritten letters of 28x28 pixels in 26 classes (Cohen et al., 2017).

    Args:
        root: Folder that contains ``EMNIST/raw``.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random; without effect on this set.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 26, (1, 28, 28), 124_800
    mean, std = (0.1722,), (0.3309,)
    source, folder = "EMNIST", "EMNIST/raw"

    def read(self, *, train: bool, download: bool, **arguments: Any) -> Any:
        """Create the torchvision data set."""
        return super().read(train=train, download=download, split="letters", **arguments)

    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Return upright images and labels from 0 (a) to 25 (z); the files are transposed and count from 1."""
        images, labels = super().tensors(dataset)
        return images.transpose(2, 3).contiguous(), labels - 1


class FederatedCIFAR10(FromTorchvision):
    """CIFAR-10: 50,000 photographs of 32x32 pixels (Krizhevsky, 2009).

    Args:
        root: Folder that contains ``cifar-10-batches-py``.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 10, (3, 32, 32), 50_000
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    crop_padding = 4
    source, folder = "CIFAR10", "cifar-10-batches-py"


class FederatedCIFAR100(FromTorchvision):
    """CIFAR-100: 50,000 photographs of 32x32 pixels (Krizhevsky, 2009).

    Args:
        root: Folder that contains ``cifar-100-python``.
        download: Whether to download missing data.
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 100, (3, 32, 32), 50_000
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    crop_padding = 4
    source, folder = "CIFAR100", "cifar-100-python"
