"""Base class of data modules that split one data set over clients.

It has loaders for each client, and pooled loaders as any LightningDataModule: in a plain ``Trainer`` it gives the
centralised baseline, with the training data of all clients in one loader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparsefl.data.by_group import ByGroup
from lightning_sparsefl.data.examples import CropFlip, Examples, Normalize, Transform
from lightning_sparsefl.data.feature_shift import FeatureShift
from lightning_sparsefl.data.memory_map import map_split, write_split
from lightning_sparsefl.data.partition import IID, Partition, check_num_clients, checked_parts, matching_test
from lightning_sparsefl.data.split import Part, SplitData, span, stops
from lightning_sparsefl.data.split_name import split_name
from lightning_sparsefl.errors import InvalidOption, is_number, is_whole, require, require_type
from lightning_sparsefl.seeds import generator, seed_from_environment

_NOT_OPTIONS = frozenset({*vars(L.LightningDataModule()), "trainer", "client_sizes", "client_names", "memory_map"})


TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of the batch transfer, in the order of their calls."""


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
        feature_shift: Change of the inputs by client; None for no change. Each client's training, validation and test
            inputs are changed as its own. Of the whole test set, every `num_clients`-th example is changed as those of
            one client.
        memory_map: Folder on a disk of each machine for files of the split data, which all processes of the machine
            map into memory as one copy; None for a copy in each process. The files are named by the values of all
            attributes without a leading underscore, which must be plain values, arrays, tensors, or dataclasses of
            these.

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
    client_names: Sequence[str] | None = None
    """Name of each client, such as its group in the data, known once the data is set up; None for no names."""
    has_columns: ClassVar[bool] = False
    """Whether the data has columns from which groups can be read."""

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
        feature_shift: FeatureShift | None = None,
        memory_map: str | None = None,
    ) -> None:
        super().__init__()
        require_type("data.partition", partition, Partition)
        require_type("data.drop_last", drop_last, bool)
        require_type("data.feature_shift", feature_shift, FeatureShift | None)
        fits = self.has_columns or not isinstance(partition, ByGroup)
        expected = f"another partition, since {type(self).__name__} has no columns; `FederatedDataset` has them"
        require(fits, "data.partition", partition, expected)
        fits = is_number(val_fraction) and 0 <= val_fraction < 1
        require(fits, "data.val_fraction", val_fraction, "a number in [0, 1)")
        require(eval_split in ("val", "test"), "data.eval_split", eval_split, "'val' or 'test'")
        for name, value in {
            "batch_size": batch_size,
            "test_per_client": test_per_client,
            "eval_batch_size": eval_batch_size,
            "examples_per_client": examples_per_client,
        }.items():
            fits = is_whole(value, 1) or (value is None and name == "examples_per_client")
            require(fits, f"data.{name}", value, "a whole number >= 1")
        require(seed is None or is_whole(seed, 0), "data.seed", seed, "a whole number >= 0, or null")
        require(is_whole(num_workers, 0), "data.num_workers", num_workers, "a whole number >= 0")
        self.num_clients, self.partition, self.batch_size = num_clients, partition, batch_size
        self.val_fraction, self.test_per_client, self.eval_split = val_fraction, test_per_client, eval_split
        self.seed, self.eval_batch_size = seed, eval_batch_size
        self.drop_last, self.num_workers, self.examples_per_client = drop_last, num_workers, examples_per_client
        self.feature_shift = feature_shift
        self.memory_map = None if memory_map is None else os.path.expanduser(memory_map)
        self.client_sizes: Sequence[int] = self._nominal_sizes()
        self._held: SplitData | None = None

    def __str__(self) -> str:
        # that of LightningDataModule reads all loaders, and fails if one of them is None
        return f"{type(self).__name__}(num_clients={self.num_clients}, partition={self.partition})"

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load the whole data set.

        Returns:
            Training inputs of shape ``(examples, *sample_shape)``, training labels (int64), test inputs and test
            labels. Images should be uint8: they take a quarter of the memory of float32, and are normalised batch by
            batch.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must implement `load()`.")

    def assign(self, labels: Tensor, seed: int) -> Sequence[Tensor]:
        """Return the indices of each client's training examples. Default: by `partition`.

        Args:
            labels: Labels of all training examples.
            seed: Random seed of the partition.
        """
        return self.partition.split(labels, self.num_clients, seed)

    def choose_test(self, client: int, train_labels: Tensor, test_labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return the indices of a client's test examples. Default: :func:`matching_test`.

        Args:
            client: Number of the client.
            train_labels: Labels of the client's training examples.
            test_labels: Labels of the whole test set.
            rng: Generator for all random draws.
        """
        return matching_test(train_labels, test_labels, self.test_per_client, rng)

    def transform(self, train: bool) -> Transform | None:
        """Return the transform of a batch of stored inputs, or None for no transform.

        Args:
            train: Whether the transform is for training, with augmentation.
        """
        normalize = Normalize(self.mean, self.std, self.high) if self.mean else None
        if train and self.crop_padding is not None:
            return CropFlip(self.crop_padding, then=normalize)
        return normalize

    def prepare_data(self) -> None:
        """Load and split the data set and write it to the folder `memory_map`, if there is one.

        A subclass that downloads data does so first, and then calls this method.

        Raises:
            DataNotFound: If the data is not on disk.
            InvalidOption: If the split leaves a client without training, validation or test examples, or if the files
                of `memory_map` cannot be named by an option.
        """
        if self.memory_map is not None:
            name = self._name_of_split()
            write_split(self._split(*self._loaded()), Path(self.memory_map), name)

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data set, and update `client_sizes`; later calls have no effect.

        Raises:
            DataNotFound: If the data is not on disk.
            InvalidOption: If the split leaves a client without training, validation or test examples.
        """
        if self._held is None:
            self._held = self._load_split()
            self.client_sizes = self._held.train_stops.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()

    def num_examples(self, client: int) -> int:
        """Return the number of training samples of a client: nominal before :meth:`setup`, actual after it."""
        return self.client_sizes[client]

    def datamodule_of(self, client: int) -> L.LightningDataModule:
        """Return the data module of a client's trainer, which calls its hooks of the batch transfer. Default: this one.

        Args:
            client: Number of the client.
        """
        return self

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of a client's training data, in an order drawn from torch's global generator."""
        start, stop = span(self._ready.train_stops, client)
        return self._train_loader(self._ready.train, start, stop)

    def client_val_dataloader(self, client: int) -> DataLoader[Any] | None:
        """Return a loader of a client's validation data, or None if `val_fraction` is 0."""
        if self._ready.val_stops is None:
            return None
        return self._eval_loader(self._ready.val, slice(*span(self._ready.val_stops, client)))

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """Return a loader of test data with the label proportions of a client's training data."""
        chosen = self._ready.test_indices[slice(*span(self._ready.test_stops, client))]
        inputs, labels = self._ready.test
        return self._eval_loader((self._shifted(inputs[chosen], client, "test"), labels[chosen]), slice(None))

    def client_label_counts(self, client: int) -> Tensor:
        """Count the training examples of each class of a client, int64 of shape (classes,)."""
        start, stop = span(self._ready.train_stops, client)
        return torch.bincount(self._train_labels()[start:stop].long(), minlength=self.num_classes)

    def _train_labels(self) -> Tensor:
        """Return the labels of the training examples, ordered by client."""
        return self._ready.train[1]

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
        if self.feature_shift is None:
            return self._eval_loader(self._ready.test, slice(None))
        return self._eval_loader(self._gather(self._ready.test, self._whole_test(), "whole test"), slice(None))

    def _load_split(self) -> SplitData:
        if self.memory_map is None:
            return self._split(*self._loaded())
        return map_split(Path(self.memory_map), self._name_of_split())

    def _loaded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors of :meth:`load`, with a label for each example."""
        loaded = self.load()
        name, expected = f"`{type(self).__name__}.load`", "four tensors: training and test inputs, each with its labels"
        if not isinstance(loaded, tuple) or len(loaded) != 4 or not all(isinstance(part, Tensor) for part in loaded):
            kinds = ", ".join(type(part).__name__ for part in (loaded if isinstance(loaded, tuple) else (loaded,)))
            raise InvalidOption(f"{name} returned {kinds}; expected {expected}.")
        for kind, inputs, labels in (("training", *loaded[:2]), ("test", *loaded[2:])):
            if len(inputs) != len(labels):
                raise InvalidOption(f"{name} returned {len(inputs)} {kind} inputs with {len(labels)} labels.")
        return loaded

    def _name_of_split(self) -> str:
        """Return the class with a digest of its options, which tells splits in one folder apart."""
        own = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in _NOT_OPTIONS}
        return split_name(type(self), own, self.seed_in_use())

    @property
    def _ready(self) -> SplitData:
        if self._held is None:
            self.setup()
        assert self._held is not None
        return self._held

    def _train_loader(self, part: Part, start: int, stop: int) -> DataLoader[Any]:
        inputs, labels = part
        examples = Examples(inputs[start:stop], labels[start:stop], self.transform(train=True))
        return examples.loader(self.batch_size, shuffle=True, drop_last=self.drop_last, num_workers=self.num_workers)

    def _eval_loader(self, part: Part, which: slice) -> DataLoader[Any]:
        inputs, labels = part
        examples = Examples(inputs[which], labels[which], self.transform(train=False))
        return examples.loader(self.eval_batch_size, num_workers=self.num_workers)

    def _nominal_sizes(self) -> Sequence[int]:
        if not hasattr(self, "num_train"):
            raise InvalidOption(f"`{type(self).__name__}` has no `num_train`; set it in the class.")
        check_num_clients(self.num_clients, self.num_train)
        share, rest = divmod(self.num_train, self.num_clients)
        sizes = [self.examples_per_client or share + (client < rest) for client in range(self.num_clients)]
        return [size - self._num_held_out(size, client) for client, size in enumerate(sizes)]

    def _num_held_out(self, size: int, client: int, option: str = "val_fraction") -> int:
        fraction: float = getattr(self, option)
        if fraction == 0:
            return 0
        if size < 2:
            own_test = option == "val_fraction" and getattr(self, "test_fraction", 0) > 0
            beside, least = (" beside those of `data.test_fraction`", "more than 2") if own_test else ("", "2")
            has_least = hasattr(self.partition, "min_examples")
            ways = f"set `data.partition.min_examples` to {least}" if has_least else "change `data.partition`"
            others = "" if isinstance(self.partition, ByGroup) else ", lower `data.num_clients`"
            instead = f"set `data.{option}` to 0" + ("" if option == "val_fraction" else " and give `data.test`")
            raise InvalidOption(
                f"`data.{option}` is {fraction}, which needs at least 2 examples per client{beside}, but client "
                f"{client} has {size}; {ways}{others}, or {instead}."
            )
        return min(max(round(fraction * size), 1), size - 1)

    def _wanted(self, size: int, client: int) -> int:
        wanted = size if self.examples_per_client is None else self.examples_per_client
        if wanted > size:
            raise InvalidOption(
                f"`data.examples_per_client` is {wanted}, but the partition gives client {client} only {size}; lower "
                "it or `data.num_clients`, or change `data.partition`."
            )
        return wanted

    def seed_in_use(self) -> int:
        """Return the seed of the partition and the held-out sets: `seed`, or that of ``seed_everything``."""
        return seed_from_environment() if self.seed is None else self.seed

    def _split(self, inputs: Tensor, labels: Tensor, test_inputs: Tensor, test_labels: Tensor) -> SplitData:
        seed = self.seed_in_use()
        train: list[Tensor] = []
        val: list[Tensor] = []
        test: list[Tensor] = []
        what = f"`{type(self).__name__}.assign` returned"
        for client, owned in enumerate(checked_parts(self.assign(labels, seed), self.num_clients, len(labels), what)):
            rng = generator(seed, "partition", "held out", client)
            order = owned[torch.randperm(len(owned), generator=rng)][: self._wanted(len(owned), client)]
            parts = self._divide(client, order, labels, test_labels, rng)
            for own, part in zip((train, val, test), parts, strict=True):
                own.append(part)
        return SplitData(
            train=self._gather((inputs, labels), train, "train"),
            train_stops=stops(train),
            val=self._gather((inputs, labels), val, "val"),
            val_stops=stops(val) if self.val_fraction else None,
            test=(test_inputs, test_labels),
            test_indices=torch.cat(test),
            test_stops=stops(test),
        )

    def _divide(
        self, client: int, owned: Tensor, labels: Tensor, test_labels: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divide a client's examples, in random order, into training and validation, and choose its test examples."""
        train, val = self._hold_out(client, owned)
        test = self.choose_test(client, labels[train], test_labels, rng)
        require_type(f"{type(self).__name__}.choose_test", test, Tensor)
        if not len(test):
            raise InvalidOption(
                f"The test set contains no example of the classes of client {client}, so the client cannot be "
                "evaluated; change `data.partition` or lower `data.num_clients`."
            )
        return train, val, test

    def _hold_out(self, client: int, owned: Tensor) -> tuple[Tensor, Tensor]:
        """Divide a client's examples into training and validation."""
        held_out = self._num_held_out(len(owned), client)
        return owned[held_out:], owned[:held_out]

    def _gather(self, part: Part, owned: Sequence[Tensor], use: str) -> Part:
        """Copy the examples of each client, ordered by client, with its feature shift."""
        inputs, labels = (values[torch.cat(list(owned))] for values in part)
        if self.feature_shift is not None:
            own = inputs.split([len(indices) for indices in owned])
            inputs = torch.cat([self._shifted(inputs, client, use) for client, inputs in enumerate(own)])
        return inputs, labels

    def _shifted(self, inputs: Tensor, client: int, use: str) -> Tensor:
        """Shift inputs as those of a client; the random draws depend on the seed, the client and the use alone."""
        if self.feature_shift is None:
            return inputs
        rng = generator(self.seed_in_use(), "feature shift", client, use)
        return self.feature_shift(inputs, client / self.num_clients, rng, self.high)

    def _whole_test(self) -> list[Tensor]:
        """Return the examples of the whole test set that are shifted as those of each client."""
        every = torch.arange(len(self._ready.test[1]))
        return [every[client :: self.num_clients] for client in range(self.num_clients)]


def no_loader(data: L.LightningDataModule) -> list[Any] | None:
    """Return what stands for missing validation data: None, or ``[]`` for a plain ``Trainer``, which rejects None."""
    return [] if isinstance(data.trainer, L.Trainer) else None
