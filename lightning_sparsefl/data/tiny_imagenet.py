"""Tiny-ImageNet: 100,000 photographs of 64x64 pixels in 200 classes, read from the folders as they are published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_sparsefl.data.images import rgb_image
from lightning_sparsefl.data.vision import FromTorchvision

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


class FederatedTinyImageNet(FromTorchvision):
    """Tiny-ImageNet: 100,000 photographs of 64x64 pixels in 200 classes (Le and Yang, CS231N, 2015).

    The 10,000 images of the published validation set are the test set, since the labels of the published test set are
    not public. All images are decoded when the data is loaded, and take 1.4 GB of memory. The published folders are
    ``train/<class>/images/*.JPEG``, and ``val/images`` with the classes in ``val/val_annotations.txt``.

    Args:
        root: Folder that contains ``tiny-imagenet-200``.
        download: Whether to download missing data (237 MB).
        normalization: Scale of the inputs: ``"dataset"`` (mean 0, standard deviation 1), ``"half"`` ([-1, 1]) or
            ``"unit"`` ([0, 1]).
        augment: Whether training images are cropped and flipped at random.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes, sample_shape, num_train = 200, (3, 64, 64), 100_000
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    crop_padding = 8
    folder = "tiny-imagenet-200"

    def read(self, *, train: bool, download: bool, **arguments: Any) -> Any:
        """Read the images of one part, uint8 of shape (images, height, width, channels), and their labels."""
        if download and not (Path(self.root) / self.folder).is_dir():
            from torchvision.datasets.utils import download_and_extract_archive

            download_and_extract_archive(URL, self.root, md5=_MD5)
        paths, labels = self._files(train)
        return SimpleNamespace(data=np.stack([_pixels(path) for path in paths]), targets=labels)

    def _files(self, train: bool) -> tuple[list[Path], list[int]]:
        """Return the paths of the images of one part, in order, and their labels."""
        folder = Path(self.root) / self.folder
        names = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
        if train:
            of_class = [sorted((folder / "train" / name / "images").glob("*.JPEG")) for name in names]
            if not all(of_class):
                raise FileNotFoundError("a class has no images")
            labels = [label for label, paths in enumerate(of_class) for _ in paths]
            return [path for paths in of_class for path in paths], labels
        lines = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
        rows = [line.split("\t")[:2] for line in lines]
        return [folder / "val" / "images" / file for file, _ in rows], [names.index(name) for _, name in rows]


def _pixels(path: Path) -> np.ndarray:
    """Decode one image to RGB; some of the files are greyscale."""
    image = rgb_image(path)
    if image is None or image.size != (64, 64):
        raise ValueError(f"{path} is no image of 64x64 pixels")
    return np.asarray(image)
