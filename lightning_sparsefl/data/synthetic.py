"""Synthetic data sets of Gaussian blobs, as one data set or generated for each client on demand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.seeds import derive_seed, generator


class FederatedBlobs(FederatedDataModule):
    """Synthetic data set with one Gaussian blob per class and samples of shape (1, 1, `dim`).

    Args:
        num_clients: Number of clients.
        num_classes: Number of classes.
        dim: Number of features of a sample.
        num_train: Number of training examples.
        num_test: Number of test examples.
        noise: Standard deviation within a class; that of the class centres is 1.
        options: Further arguments of :class:`FederatedDataModule`; the seed also determines the examples.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    def __init__(
        self,
        *,
        num_clients: int = 10,
        num_classes: int = 4,
        dim: int = 16,
        num_train: int = 1000,
        num_test: int = 400,
        noise: float = 0.5,
        **options: Any,
    ) -> None:
        sizes = {"num_classes": num_classes, "dim": dim, "num_train": num_train, "num_test": num_test}
        for name, value in sizes.items():
            require(value >= 1, f"data.{name}", value, "a whole number >= 1")
        require(noise >= 0, "data.noise", noise, "a number >= 0")
        self.num_classes, self.sample_shape = num_classes, (1, 1, dim)
        self.num_train, self.num_test, self.noise = num_train, num_test, noise
        super().__init__(num_clients=num_clients, **options)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generate training and test samples, float32, whose classes alternate."""
        rng = generator(self.seed_in_use(), "blobs")
        centres = torch.randn(self.num_classes, *self.sample_shape, generator=rng)
        labels = torch.arange(self.num_train + self.num_test) % self.num_classes
        noise = self.noise * torch.randn(len(labels), *self.sample_shape, generator=rng)
        samples = centres[labels] + noise
        n = self.num_train
        return samples[:n], labels[:n], samples[n:], labels[n:]


class FederatedBlobsOnDemand(FederatedDataModule):
    """Synthetic data set for any number of clients, whose examples are generated on each access and not kept.

    The data of client k depend on the seed and k alone: the number of examples, their classes and their features. The
    common validation and test sets, with which the global model is evaluated, have all classes.

    Args:
        num_clients: Number of clients.
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample.
        fewest: Number of training examples of the smallest clients.
        most: Number of training examples of the largest clients; the sizes are uniformly distributed between the two.
        classes_per_client: Number of classes of a client, which are equally frequent.
        noise: Standard deviation within a class; that of the class centres is 1.
        num_pooled: Number of examples in each of the common validation and test sets.
        test_per_client: Number of validation and of test examples of a client.
        options: Further arguments of :class:`FederatedDataModule`, except those that split one data set: `partition`,
            `val_fraction`, `examples_per_client`, `feature_shift` and `memory_map`.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    def __init__(
        self,
        *,
        num_clients: int = 1_000_000,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (1, 28, 28),
        fewest: int = 20,
        most: int = 60,
        classes_per_client: int = 2,
        noise: float = 0.5,
        num_pooled: int = 1000,
        test_per_client: int = 20,
        **options: Any,
    ) -> None:
        for name, value in {"num_clients": num_clients, "fewest": fewest, "num_pooled": num_pooled}.items():
            require(value >= 1, f"data.{name}", value, "a whole number >= 1")
        require(0 <= noise < math.inf, "data.noise", noise, "a number >= 0")
        require(most >= fewest, "data.most", most, f"at least `data.fewest`, which is {fewest}")
        expected = f"a number from 1 to {num_classes}, the number of classes"
        require(1 <= classes_per_client <= num_classes, "data.classes_per_client", classes_per_client, expected)
        for name in ("partition", "val_fraction", "examples_per_client", "feature_shift", "memory_map"):
            if name in options:
                raise InvalidOption(
                    f"`data.{name}` is for a data set that is split, but this class generates the examples of each "
                    "client; omit it."
                )
        self.num_classes, self.sample_shape = num_classes, sample_shape
        self.classes_per_client, self.noise, self.num_pooled = classes_per_client, noise, num_pooled
        self.fewest, self.most = fewest, most
        super().__init__(num_clients=num_clients, test_per_client=test_per_client, **options)

    def setup(self, stage: str | None = None) -> None:
        """Do nothing, since there is no data set to load."""

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of a client's training data, in an order drawn from torch's global generator."""
        examples = self._examples(client, "train", self.num_examples(client))
        return examples.loader(self.batch_size, shuffle=True, drop_last=self.drop_last, num_workers=self.num_workers)

    def client_val_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of a client's validation data."""
        return self._scored(self._examples(client, "val", self.test_per_client))

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of a client's test data."""
        return self._scored(self._examples(client, "test", self.test_per_client))

    def client_label_counts(self, client: int) -> Tensor:
        """Count the training examples of each class of a client, int64 of shape (classes,)."""
        return torch.bincount(self._labels(client, self.num_examples(client)), minlength=self.num_classes)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data of all clients, one client after another in random order."""
        return DataLoader(_OneByOne(self), batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the common validation set."""
        return self._scored(self._common("val"))

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the common test set."""
        return self._scored(self._common("test"))

    def _nominal_sizes(self) -> Sequence[int]:
        return SpreadSizes(self.num_clients, self.fewest, self.most, self.seed_in_use())

    def _scored(self, examples: Examples) -> DataLoader[Any]:
        return examples.loader(self.eval_batch_size, num_workers=self.num_workers)

    def _examples(self, client: int, part: str, count: int) -> Examples:
        return self._blobs(self._labels(client, count), client, part)

    def _labels(self, client: int, count: int) -> Tensor:
        classes = torch.randperm(self.num_classes, generator=generator(self.seed_in_use(), client, "blob classes"))
        return classes[torch.arange(count) % self.classes_per_client]

    def _common(self, part: str) -> Examples:
        return self._blobs(torch.arange(self.num_pooled) % self.num_classes, "common", part)

    def _blobs(self, labels: Tensor, *key: int | str) -> Examples:
        centres = torch.randn(self.num_classes, *self.sample_shape, generator=generator(self.seed_in_use(), "blobs"))
        noise = torch.randn(len(labels), *self.sample_shape, generator=generator(self.seed_in_use(), *key, "blobs"))
        return Examples(centres[labels] + self.noise * noise, labels)


@dataclass(frozen=True)
class SpreadSizes(Sequence[int]):
    """Sequence of random sizes between two bounds, which are computed on access and not kept.

    Args:
        clients: Number of clients.
        fewest: Smallest size.
        most: Largest size.
        seed: Random seed.

    Example:
        >>> sizes = SpreadSizes(10**9, 20, 60, seed=0)
        >>> sizes[7] == sizes[7], min(sizes[:100]) >= 20, max(sizes[:100]) <= 60
        (True, True, True)
    """

    clients: int
    fewest: int
    most: int
    seed: int

    @property
    def rule(self) -> str:
        """Description from which all sizes follow."""
        return repr(self)

    def __len__(self) -> int:
        return self.clients

    @overload
    def __getitem__(self, client: int) -> int: ...
    @overload
    def __getitem__(self, client: slice) -> list[int]: ...
    def __getitem__(self, client: int | slice) -> int | list[int]:
        if isinstance(client, slice):
            return [self[i] for i in range(self.clients)[client]]
        number = range(self.clients)[client]
        return self.fewest + derive_seed(self.seed, number, "size") % (self.most - self.fewest + 1)


class _OneByOne(IterableDataset[Any]):
    """Batches of all clients, one client after another in random order."""

    def __init__(self, data: FederatedBlobsOnDemand) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for client in torch.randperm(self.data.num_clients):
            yield from self.data.client_train_dataloader(int(client))
