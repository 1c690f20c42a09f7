"""Base class of data modules that split one data set over clients.

It has loaders for each client, and pooled loaders as any LightningDataModule: in a plain ``Trainer`` it gives the
centralised baseline, with the training data of all clients in one loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparsefl.data.examples import CropFlip, Examples, Normalize, Transform
from lightning_sparsefl.data.partition import IID, Partition, check_num_clients, matching_test
from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.seeds import generator, seed_from_environment


class FederatedDataModule(L.LightningDataModule):
    """Base class of federated data sets; a subclass sets class attributes and implements :meth:`load`.

    ::

        class FederatedStars(FederatedDataModule):
            num_classes, sample_shape, num_train = 3, (1, 16, 16), 12_000
            mean, std = (0.1,), (0.2,)

            def load(self):
                return train_images, train_labels, test_images, test_labels

    The order of training samples and the augmentation are drawn from torch's global generator.

    Args:
        num_clients: Number of clients.
        partition: Partition of the training examples over the clients.
        batch_size: Number of samples in a training batch.
        val_fraction: Fraction of each client's training data that is held out for validation, in [0, 1); at least
            one example if above 0.
        test_per_client: Number of test examples of each client, drawn from the common test set with the label
            proportions of the client's training data, rounded up per label.
        eval_split: Split of the clients that is evaluated during training.
        seed: Random seed of the partition and the held-out sets; None for the seed of ``seed_everything`` (the
            environment variable ``PL_GLOBAL_SEED``), or 0 if it is not set.
        eval_batch_size: Number of samples in a validation or test batch.
        drop_last: Whether to leave out a smaller last training batch.
        examples_per_client: Number of examples that each client keeps of those the partition gives it, chosen at
            random; None for all.
        num_workers: Number of worker processes of each loader.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    num_classes: int
    """Number of classes."""
    sample_shape: tuple[int, int, int]
    """Channels, height and width of one sample."""
    num_train: int
    """Number of training examples of the whole data set, known before it is loaded."""
    mean: Sequence[float] = ()
    """Mean of each channel, after scaling to [0, 1]; empty to use the inputs as stored."""
    std: Sequence[float] = ()
    """Standard deviation of each channel, after scaling to [0, 1]."""
    high: float = 255.0
    """Stored value that is scaled to 1."""
    crop_padding: int | None = None
    """Padding of the random crop in training, which is followed by a random flip; None for no augmentation."""

    def __init__(
        self,
        *,
        num_clients: int = 100,
        partition: Partition = IID(),  # noqa: B008 - immutable, and shown as the default by `--help`
        batch_size: int = 32,
        val_fraction: float = 0.0,
        test_per_client: int = 100,
        eval_split: Literal["val", "test"] = "val",
        seed: int | None = None,
        eval_batch_size: int = 256,
        drop_last: bool = False,
        examples_per_client: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        require(0 <= val_fraction < 1, "data.val_fraction", val_fraction, "a number in [0, 1)")
        require(eval_split in ("val", "test"), "data.eval_split", eval_split, "'val' or 'test'")
        for name, value in {
            "batch_size": batch_size,
            "test_per_client": test_per_client,
            "eval_batch_size": eval_batch_size,
            "examples_per_client": examples_per_client,
        }.items():
            require(value is None or value >= 1, f"data.{name}", value, "a whole number >= 1")
        self.num_clients, self.partition, self.batch_size = num_clients, partition, batch_size
        self.val_fraction, self.test_per_client, self.eval_split = val_fraction, test_per_client, eval_split
        self.seed, self.eval_batch_size = seed, eval_batch_size
        self.drop_last, self.num_workers, self.examples_per_client = drop_last, num_workers, examples_per_client
        self.client_sizes: Sequence[int] = self._nominal_sizes()
        self._held: _SplitData | None = None

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load the whole data set.

        Returns:
            Training inputs of shape (examples, *sample_shape), training labels (int64), test inputs and test labels.
            Images should be uint8: they take a quarter of the memory of float32, and are normalised batch by batch.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must implement `load()`.")

    def transform(self, train: bool) -> Transform | None:
        """Return the transform of a batch of stored inputs, or None for no transform.

        Args:
            train: Whether the transform is for training, with augmentation.
        """
        normalize = Normalize(self.mean, self.std, self.high) if self.mean else None
        if train and self.crop_padding is not None:
            return CropFlip(self.crop_padding, then=normalize)
        return normalize

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data set, and update `client_sizes`; later calls have no effect.

        Raises:
            DataNotFound: If the data is not on disk.
            InvalidOption: If the split leaves a client without training, validation or test examples.
        """
        if self._held is None:
            self._held = self._split(*self.load())
            self.client_sizes = self._held.train_stops.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()

    def num_examples(self, client: int) -> int:
        """Return the number of training samples of a client: nominal before :meth:`setup`, actual after it."""
        return self.client_sizes[client]

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of a client's training data, in an order drawn from torch's global generator."""
        start, stop = _span(self._ready.train_stops, client)
        return self._train_loader(self._ready.train, start, stop)

    def client_val_dataloader(self, client: int) -> DataLoader[Any] | None:
        """Return a loader of a client's validation data, or None if `val_fraction` is 0."""
        if self._ready.val_stops is None:
            return None
        return self._eval_loader(self._ready.val, slice(*_span(self._ready.val_stops, client)))

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of test data with the label proportions of a client's training data."""
        start, stop = _span(self._ready.test_stops, client)
        return self._eval_loader(self._ready.test, self._ready.test_indices[start:stop])

    def client_label_counts(self, client: int) -> Tensor:
        """Count the training examples of each class of a client, int64 of shape (classes,)."""
        start, stop = _span(self._ready.train_stops, client)
        return torch.bincount(self._ready.train[1][start:stop], minlength=self.num_classes)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data of all clients."""
        return self._train_loader(self._ready.train, 0, len(self._ready.train[1]))

    def val_dataloader(self) -> DataLoader[Any] | list[Any] | None:
        """Return a loader of the validation data of all clients; None (``[]`` in a ``Trainer``) without any."""
        if self._ready.val_stops is None:
            return no_loader(self)
        return self._eval_loader(self._ready.val, slice(None))

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the whole test set."""
        return self._eval_loader(self._ready.test, slice(None))

    @property
    def _ready(self) -> _SplitData:
        if self._held is None:
            self.setup()
        assert self._held is not None
        return self._held

    def _train_loader(self, part: tuple[Tensor, Tensor], start: int, stop: int) -> DataLoader[Any]:
        inputs, labels = part
        examples = Examples(inputs[start:stop], labels[start:stop], self.transform(train=True))
        return examples.loader(self.batch_size, shuffle=True, drop_last=self.drop_last, num_workers=self.num_workers)

    def _eval_loader(self, part: tuple[Tensor, Tensor], which: slice | Tensor) -> DataLoader[Any]:
        inputs, labels = part
        examples = Examples(inputs[which], labels[which], self.transform(train=False))
        return examples.loader(self.eval_batch_size, num_workers=self.num_workers)

    def _nominal_sizes(self) -> Sequence[int]:
        check_num_clients(self.num_clients, self.num_train)
        share, rest = divmod(self.num_train, self.num_clients)
        sizes = [self.examples_per_client or share + (client < rest) for client in range(self.num_clients)]
        return [size - self._num_held_out(size, client) for client, size in enumerate(sizes)]

    def _num_held_out(self, size: int, client: int) -> int:
        if self.val_fraction == 0:
            return 0
        if size < 2:
            raise InvalidOption(
                f"`data.val_fraction` is {self.val_fraction}, which needs at least 2 examples per client, but client "
                f"{client} has {size}; lower `data.num_clients`, change `data.partition`, or set `data.val_fraction` "
                "to 0."
            )
        return min(max(round(self.val_fraction * size), 1), size - 1)

    def _wanted(self, size: int, client: int) -> int:
        wanted = size if self.examples_per_client is None else self.examples_per_client
        if wanted > size:
            raise InvalidOption(
                f"`data.examples_per_client` is {wanted}, but the partition gives client {client} only {size}; lower "
                "it or `data.num_clients`, or change `data.partition`."
            )
        return wanted

    def _seed(self) -> int:
        return seed_from_environment() if self.seed is None else self.seed

    def _split(self, inputs: Tensor, labels: Tensor, test_inputs: Tensor, test_labels: Tensor) -> _SplitData:
        seed = self._seed()
        train, val, test = [], [], []
        for client, owned in enumerate(self.partition.split(labels, self.num_clients, seed)):
            rng = generator(seed, "partition", "held out", client)
            order = owned[torch.randperm(len(owned), generator=rng)][: self._wanted(len(owned), client)]
            held_out = self._num_held_out(len(order), client)
            val.append(order[:held_out])
            train.append(order[held_out:])
            test.append(matching_test(labels[train[-1]], test_labels, self.test_per_client, rng))
            if not len(test[-1]):
                raise InvalidOption(
                    f"The test set contains no example of the classes of client {client}, so the client cannot be "
                    "evaluated; change `data.partition` or lower `data.num_clients`."
                )
        return _SplitData(
            train=_reorder(inputs, labels, train),
            train_stops=_stops(train),
            val=_reorder(inputs, labels, val),
            val_stops=_stops(val) if self.val_fraction else None,
            test=(test_inputs, test_labels),
            test_indices=torch.cat(test),
            test_stops=_stops(test),
        )


def no_loader(data: L.LightningDataModule) -> list[Any] | None:
    """Return what stands for missing validation data: None, or ``[]`` for a plain ``Trainer``, which rejects None."""
    return [] if isinstance(data.trainer, L.Trainer) else None


@dataclass(frozen=True, kw_only=True)
class _SplitData:
    """Split data set, ordered by client, so that the examples of a client are a view and not a copy.

    The examples of a client end at its entry of `*_stops`, and start where those of the previous client end.
    """

    train: tuple[Tensor, Tensor]
    train_stops: Tensor
    val: tuple[Tensor, Tensor]
    val_stops: Tensor | None
    test: tuple[Tensor, Tensor]
    test_indices: Tensor
    test_stops: Tensor


def _reorder(inputs: Tensor, labels: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    order = torch.cat(parts)
    return inputs[order], labels[order]


def _stops(parts: list[Tensor]) -> Tensor:
    return torch.tensor([len(part) for part in parts]).cumsum(0)


def _span(stops: Tensor, client: int) -> tuple[int, int]:
    return int(stops[client - 1]) if client else 0, int(stops[client])
