"""One data set, many owners: a LightningDataModule with a loader for each client, and pooled loaders.

In a plain ``Trainer`` it is the centralised baseline: all clients' training data in one loader.
"""

from __future__ import annotations

import os
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
from lightning_sparsefl.seeds import generator


class FederatedDataModule(L.LightningDataModule):
    """Base of the federated data sets. A subclass states four facts and implements :meth:`load`.

    ::

        class FederatedStars(FederatedDataModule):
            num_classes, sample_shape, num_train = 3, (1, 16, 16), 12_000
            mean, std = (0.1,), (0.2,)

            def load(self):
                return train_images, train_labels, test_images, test_labels

    Loaders take their order, and augmentation its draws, from torch's global generator.

    Args:
        num_clients: Number of clients.
        partition: Who owns which training examples.
        batch_size: Training samples per batch.
        val_fraction: Share of each client's training data that is held out for validation, in [0, 1); at
            least one example when above 0.
        test_per_client: Size of each client's test set, drawn from the common one with the label proportions
            of its training data, rounded up per label.
        eval_split: Whether training is followed on the clients' validation or test sets.
        seed: What partition and held-out sets depend on; None = the seed of ``seed_everything`` (the variable
            ``PL_GLOBAL_SEED``), or 0 without.
        eval_batch_size: Validation and test samples per batch.
        drop_last: Leave out a last, smaller training batch.
        examples_per_client: How many of the examples dealt to it each client owns, drawn by chance; None = all.
        num_workers: Worker processes of each loader.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    num_classes: int
    """Number of classes."""
    sample_shape: tuple[int, int, int]
    """Channels, height, width of one sample."""
    num_train: int
    """Training examples of the whole data set, known before it is loaded."""
    mean: Sequence[float] = ()
    """Mean of each channel, of values in [0, 1]; empty = inputs are used as stored."""
    std: Sequence[float] = ()
    """Standard deviation of each channel."""
    high: float = 255.0
    """The stored value that stands for 1."""
    crop_padding: int | None = None
    """Padding of the random crop and flip in training; None = no augmentation."""

    def __init__(
        self,
        *,
        num_clients: int = 100,
        partition: Partition = IID(),  # noqa: B008 - a frozen value; the command line shows it as the default
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
        self._held: _Held | None = None

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The whole data set.

        Returns:
            Training inputs (examples, *sample_shape), training labels (int64), test inputs, test labels.
            Images are best given as uint8: they are normalised batch by batch.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must implement `load()`.")

    def transform(self, train: bool) -> Transform | None:
        """What happens to each batch of stored inputs.

        Args:
            train: Whether the batch is for training.
        """
        normalize = Normalize(self.mean, self.std, self.high) if self.mean else None
        if train and self.crop_padding is not None:
            return CropFlip(self.crop_padding, then=normalize)
        return normalize

    def setup(self, stage: str | None = None) -> None:
        """Load and split; `client_sizes` become the actual ones. Later calls do nothing.

        Raises:
            DataNotFound: If the data is not on disk.
            InvalidOption: If the split leaves a client without training, validation or test examples.
        """
        if self._held is None:
            self._held = self._split(*self.load())
            self.client_sizes = self._held.train_stops.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()

    def num_examples(self, client: int) -> int:
        """Training samples of a client: nominal before :meth:`setup`, actual after it."""
        return self.client_sizes[client]

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """A client's training data, in an order drawn from torch's global generator."""
        start, stop = _span(self._ready.train_stops, client)
        return self._train_loader(self._ready.train, start, stop)

    def client_val_dataloader(self, client: int) -> DataLoader[Any] | None:
        """A client's validation data; None without a `val_fraction`."""
        if self._ready.val_stops is None:
            return None
        return self._eval_loader(self._ready.val, slice(*_span(self._ready.val_stops, client)))

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """Test data with the label proportions of a client's training data."""
        start, stop = _span(self._ready.test_stops, client)
        return self._eval_loader(self._ready.test, self._ready.test_indices[start:stop])

    def client_label_counts(self, client: int) -> Tensor:
        """How many training examples of each class a client owns: int64 of shape (classes,)."""
        start, stop = _span(self._ready.train_stops, client)
        return torch.bincount(self._ready.train[1][start:stop], minlength=self.num_classes)

    def train_dataloader(self) -> DataLoader[Any]:
        """All clients' training data."""
        return self._train_loader(self._ready.train, 0, len(self._ready.train[1]))

    def val_dataloader(self) -> DataLoader[Any] | list[Any] | None:
        """All clients' validation data; without a `val_fraction` None, or nothing in a plain ``Trainer``."""
        if self._ready.val_stops is None:
            return no_loader(self)
        return self._eval_loader(self._ready.val, slice(None))

    def test_dataloader(self) -> DataLoader[Any]:
        """The whole test set."""
        return self._eval_loader(self._ready.test, slice(None))

    @property
    def _ready(self) -> _Held:
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
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    def _split(self, inputs: Tensor, labels: Tensor, test_inputs: Tensor, test_labels: Tensor) -> _Held:
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
                    f"The test set has none of the classes of client {client}, so it cannot be scored; "
                    "change `data.partition` or lower `data.num_clients`."
                )
        return _Held(
            train=_reorder(inputs, labels, train),
            train_stops=_stops(train),
            val=_reorder(inputs, labels, val),
            val_stops=_stops(val) if self.val_fraction else None,
            test=(test_inputs, test_labels),
            test_indices=torch.cat(test),
            test_stops=_stops(test),
        )


def no_loader(data: L.LightningDataModule) -> list[Any] | None:
    """No data to validate on: a plain ``Trainer`` refuses None but takes an empty list."""
    return [] if isinstance(data.trainer, L.Trainer) else None


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The loaded data, in which a client's examples lie side by side, so that its share is a view, not a copy.

    What is known of a client is where its share stops; it starts where the one before stops.
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
