"""DomainNet: images of the same classes from six domains, each of which has clients of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.data.examples import FlipRotate, Normalize, Transform
from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.data.images import rgb_image
from lightning_sparsefl.data.partition import matching_test
from lightning_sparsefl.errors import DataNotFound, is_whole, nearest, require

SOURCE = "http://ai.bu.edu/M3SDA"
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
"""The ten classes of Li et al., "FedBN" (arXiv:2102.07623), which Split-Mix and PerFedMask use too."""


class FederatedDomainNet(FederatedDataModule):
    """DomainNet (Peng et al., 2019): clip art, infographics, paintings, quick drawings, photographs and sketches.

    Every domain has the same number of clients, and `partition` splits the training examples of each domain over them;
    client k belongs to domain ``k * len(domains) // num_clients``, and its test examples are of that domain. Images are
    resized when the data is loaded: ten classes of all domains take about 3 GB at 256x256 pixels.

    The published files are ``<domain>/<class>/*.jpg`` (or ``.png``) and, with one path and label per line,
    ``<domain>_train.txt`` and ``<domain>_test.txt``.

    Args:
        root: Folder that contains ``DomainNet``.
        domains: Domains to use.
        classes: Classes to use, in the order of their labels.
        size: Height and width that all images are resized to.
        equal_domains: Whether each domain contributes as many training examples as the smallest one does, at equal
            distances in its list, which is sorted by class. The program of PerFedMask takes the first ones of other
            lists, those of FedBN, which are pickles and are not read.
        augment: Whether training images are flipped and rotated by up to 30 degrees at random.
        num_clients: Number of clients, a multiple of the number of domains.
        options: Further arguments of :class:`FederatedDataModule`.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def __init__(
        self,
        root: str = "data",
        *,
        domains: Sequence[str] = DOMAINS,
        classes: Sequence[str] = TEN,
        size: int = 256,
        equal_domains: bool = True,
        augment: bool = True,
        num_clients: int = 30,
        **options: Any,
    ) -> None:
        known = bool(domains) and set(domains) <= set(DOMAINS) and len(set(domains)) == len(domains)
        require(known, "data.domains", list(domains), f"some of {', '.join(DOMAINS)}, each at most once")
        fits = len(set(classes)) == len(classes) >= 2
        require(fits, "data.classes", list(classes), "at least two names of classes, each at most once")
        require(size >= 1, "data.size", size, "a whole number >= 1")
        fits = is_whole(num_clients, 1) and num_clients % len(domains) == 0
        require(fits, "data.num_clients", num_clients, f"a multiple of the number of domains, {len(domains)}")
        self.root, self.domains, self.classes = os.path.expanduser(root), tuple(domains), tuple(classes)
        self.size, self.equal_domains, self.augment = size, equal_domains, augment
        self.num_classes, self.sample_shape = len(self.classes), (3, size, size)
        self._domain_of: dict[str, Tensor] = {}
        super().__init__(num_clients=num_clients, **options)

    def prepare_data(self) -> None:
        """Check that the data is there, which is not downloaded, and write the files of `memory_map`.

        Raises:
            DataNotFound: If a list or a folder is missing, with the page that offers the data.
            InvalidOption: If a class occurs in no training list.
        """
        self._lists()
        super().prepare_data()

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load the images, uint8 of shape (examples, 3, size, size), and the labels.

        Raises:
            DataNotFound: If a list, a folder or an image is missing, or an image cannot be read.
            InvalidOption: If a class occurs in no training list.
        """
        found = self._lists()
        parts: list[Tensor] = []
        for part in ("train", "test"):
            lists = [found[domain, part] for domain in self.domains]
            self._domain_of[part] = torch.cat([torch.full((len(own),), i) for i, own in enumerate(lists)])
            listed = [entry for own in lists for entry in own]
            try:
                images = torch.stack([_pixels(path, self.size) for path, _ in listed])
            except DataNotFound:
                raise
            except FileNotFoundError as error:
                raise self._missing(Path(str(error.filename))) from None
            parts += [images, torch.tensor([label for _, label in listed])]
        return parts[0], parts[1], parts[2], parts[3]

    def assign(self, labels: Tensor, seed: int) -> Sequence[Tensor]:
        """Split the examples of each domain over the clients of the domain.

        Raises:
            InvalidOption: If a domain has fewer examples than clients.
        """
        most = int(self._domain_of["train"].bincount().min()) * len(self.domains)
        expected = f"at most {most}, which gives each client one training example of the smallest domain"
        require(self.num_clients <= most, "data.num_clients", self.num_clients, expected)
        owned: list[Tensor] = []
        for number in range(len(self.domains)):
            mine = (self._domain_of["train"] == number).nonzero().flatten()
            per_domain = self.num_clients // len(self.domains)
            owned += [mine[share] for share in self.partition.split(labels[mine], per_domain, seed + number)]
        return owned

    def choose_test(self, client: int, train_labels: Tensor, test_labels: Tensor, rng: torch.Generator) -> Tensor:
        """Choose test examples of the client's domain with its label proportions."""
        number = client * len(self.domains) // self.num_clients
        mine = (self._domain_of["test"] == number).nonzero().flatten()
        return mine[matching_test(train_labels, test_labels[mine], self.test_per_client, rng)]

    def transform(self, train: bool) -> Transform | None:
        """Return the scaling to [0, 1], after flips and rotations in training."""
        normalize = Normalize(self.mean, self.std)
        return FlipRotate(then=normalize) if train and self.augment else normalize

    def _nominal_sizes(self) -> list[int]:
        """Return 0 for sizes that are unknown before the data is loaded."""
        return [self.examples_per_client or 0] * self.num_clients

    def _lists(self) -> dict[tuple[str, str], list[tuple[Path, int]]]:
        """Read the lists of paths and labels of each domain, with the classes that are used."""
        found = {(domain, part): self._listed(domain, part) for domain in self.domains for part in ("train", "test")}
        self._check_classes({label for domain in self.domains for _, label in found[domain, "train"]})
        if self.equal_domains:
            fewest = min(len(found[domain, "train"]) for domain in self.domains)
            found |= {(domain, "train"): _spread(found[domain, "train"], fewest) for domain in self.domains}
        return found

    def _listed(self, domain: str, part: str) -> list[tuple[Path, int]]:
        folder = Path(self.root) / "DomainNet"
        path = folder / f"{domain}_{part}.txt"
        if not path.is_file() or not (folder / domain).is_dir():
            raise self._missing(path if not path.is_file() else folder / domain)
        names = [line.rpartition(" ")[0] for line in path.read_text(encoding="utf-8").splitlines()]
        labels = {name: label for label, name in enumerate(self.classes)}
        # only the last three parts of a path count, so that a list cannot name a file elsewhere
        parts = [name.split("/")[-3:] for name in names]
        chosen = [(folder / domain / own[1] / own[2], labels[own[1]]) for own in parts if own[1:2] and own[1] in labels]
        require(bool(chosen), "data.classes", list(self.classes), f"classes that occur in {path}")
        return chosen

    def _check_classes(self, used: set[int]) -> None:
        """Raise :class:`InvalidOption` unless each class has a label that is used in a training list."""
        folder = Path(self.root) / "DomainNet"
        known = [path.name for domain in self.domains for path in (folder / domain).iterdir()]
        nearby = {name: nearest(name, known) for label, name in enumerate(self.classes) if label not in used}
        lacking = ", ".join(f"{name!r}" + (f" (nearest: {near!r})" if near else "") for name, near in nearby.items())
        expected = f"names that occur in the training lists in {folder.absolute()}, which lack {lacking}"
        require(not nearby, "data.classes", list(self.classes), expected)

    def _missing(self, path: Path) -> DataNotFound:
        return DataNotFound(
            f"`FederatedDomainNet` found no {path.absolute()}; download the images and the lists of the domains "
            f"(cleaned version) from {SOURCE} into {(Path(self.root) / 'DomainNet').absolute()}, or set another folder "
            "with `--data.root <folder>`."
        )


def _spread(entries: list[tuple[Path, int]], count: int) -> list[tuple[Path, int]]:
    """Return `count` entries at equal distances, since the lists are sorted by class."""
    return [entries[place * len(entries) // count] for place in range(count)]


def _pixels(path: Path, size: int) -> Tensor:
    """Decode and resize one image, uint8 of shape (3, size, size)."""
    import numpy as np
    from PIL import Image

    image = rgb_image(path)
    if image is None:
        raise DataNotFound(
            f"`FederatedDomainNet` found {path.absolute()}, which is no image that can be read; replace it by the file "
            f"that {SOURCE} offers."
        )
    resized = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()
