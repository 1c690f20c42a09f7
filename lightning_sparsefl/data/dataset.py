"""Any torch data set, split over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sparsefl.data.by_group import ByGroup
from lightning_sparsefl.data.columns import Values
from lightning_sparsefl.data.federated import FederatedDataModule, no_loader
from lightning_sparsefl.data.items import ClientItems, ItemShift
from lightning_sparsefl.data.keys import read_keys
from lightning_sparsefl.data.partition import IID, Partition, check_num_clients
from lightning_sparsefl.data.split import Part
from lightning_sparsefl.errors import InvalidOption, is_number, require, require_type
from lightning_sparsefl.sparse.density import listed


class FederatedDataset(FederatedDataModule):
    """Federated data module over any data set with a length and items: tabular, text, images, Hugging Face.

    ::

        data = FederatedDataset(train, test, num_clients=20, partition=Dirichlet(0.3))
        data = FederatedDataset(patients, partition=ByGroup("hospital"), test_fraction=0.2)

    Items are read and collated as by a ``DataLoader``. A ``TensorDataset`` of two tensors is read in whole batches, and
    its clients can be trained several at once (`federation.local_engine: stacked`).

    The test examples of a client have the label proportions of its training data. With ``ByGroup`` on a column they are
    those of its group, and without labels they are drawn from all.

    Args:
        train: Training data.
        test: Test data; None for none, or with `test_fraction`.
        labels: Class of each training example: the name of a column, values, or a function of an item; None to look
            where most data sets have it (`targets`, `labels`, the column ``label``, the second of two tensors). Only
            the partition and the choice of test examples use it. Floats that are found are labels only of a partition
            that needs some, since targets of a regression may be whole numbers.
        test_labels: Class of each test example; None to find it as for the training data. Where `labels` are values
            that are not found in the data, these must be values too.
        num_clients: Number of clients; None for one per group with ``ByGroup``, else 100.
        partition: Partition of the training examples over the clients.
        test_fraction: Fraction of each client's examples that is held out as its test data, in [0, 1), for data without
            `test`; at least one example if above 0.
        eval_split: Split of the clients that is evaluated during training; None for ``val`` if `val_fraction` is above
            0, else ``test``.
        collate_fn: Function from a list of items to a batch; None for that of ``DataLoader``.
        num_classes: Number of classes; None for one more than the largest label.
        sample_shape: Channels, height and width of a sample, for models that need to know it; None for that of tensors
            with three dimensions.
        options: Further arguments of :class:`FederatedDataModule`.

    Raises:
        InvalidOption: If an option is out of its range, a data set has no length, or labels or groups do not fit it.
    """

    has_columns: ClassVar[bool] = True

    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]  # the command line finds no subclasses of a parametrised type
        test: Dataset | None = None,  # type: ignore[type-arg]
        *,
        labels: Values | None = None,
        test_labels: Values | None = None,
        num_clients: int | None = None,
        partition: Partition = IID(),  # noqa: B008 - immutable, and shown as the default by `--help`
        test_fraction: float = 0.0,
        eval_split: Literal["val", "test"] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_classes: int | None = None,
        sample_shape: tuple[int, int, int] | None = None,
        **options: Any,
    ) -> None:
        require_type("data.partition", partition, Partition)
        self.train, self.test, self.collate_fn, self.test_fraction = train, test, collate_fn, test_fraction
        self.num_train, self._num_test = _length(train, "train"), 0 if test is None else _length(test, "test")
        self._keys = read_keys(train, () if test is None else test, labels, test_labels, partition)
        if num_clients is None:
            num_clients = partition.num_groups(self._keys.split) if isinstance(partition, ByGroup) else 100
        super().__init__(num_clients=num_clients, partition=partition, eval_split=eval_split or "test", **options)
        expected = "null, since each process has the data sets that it is given"
        require(self.memory_map is None, "data.memory_map", self.memory_map, expected)
        if eval_split is None and self.val_fraction > 0:
            self.eval_split = "val"
        self._check_fractions()
        self._tensors = self._read_tensors()
        self._own_labels: Tensor | None = None
        self._set_facts(num_classes, sample_shape)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors of a ``TensorDataset``, or else the rows that :class:`ClientItems` reads, and labels."""
        if self._tensors is not None:
            train, test = self._tensors
        else:
            numbers = torch.arange(self.num_train + self._num_test)
            rows = torch.stack([numbers, torch.zeros_like(numbers)], 1).split([self.num_train, self._num_test])
            own = self._keys.train if self._keys.labels is None else self._keys.labels
            train, test = (rows[0], own), (rows[1], self._keys.test)
        return *train, *(train if self.test_fraction > 0 else test)

    def assign(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Return the indices of each client's training examples, by the partition and its labels or groups.

        Raises:
            InvalidOption: If there are more clients than groups, or the test data lacks the group of a client.
        """
        parts = self.partition.split(self._keys.split, self.num_clients, seed)
        if isinstance(self.partition, ByGroup):
            groups = [self._keys.split[own].unique().tolist() for own in parts]
            self.client_names = [self._name_of(own) for own in groups]
            self._require_tested(groups)
            self._tell_left_out(groups, self.partition.min_examples)
        return parts

    def _name_of(self, groups: Sequence[int]) -> str:
        """Return the name of a client by its groups, of which only a merged one has several."""
        return self._keys.names[groups[0]] if len(groups) == 1 else f"{len(groups)} small groups"

    def _require_tested(self, groups: Sequence[Sequence[int]]) -> None:
        """Check that the test data has examples of each client's groups, if it is matched by them."""
        if not self._num_test or self._keys.train is not self._keys.split:
            return
        tested = set(self._keys.test.unique().tolist())
        missing = [self._name_of(own) for own in groups if tested.isdisjoint(own)]
        if missing:
            raise InvalidOption(
                f"`data.test` has no example of {len(missing)} of the {len(groups)} groups that are clients, "
                f"{listed(missing, 5)}; raise `data.partition.min_examples` if these are small, leave them out of "
                "`data.train`, or set `data.test_fraction` in place of `data.test`."
            )

    def _tell_left_out(self, groups: Sequence[Sequence[int]], least: int) -> None:
        """Report the groups that are not clients."""
        used = {group for own in groups for group in own}
        sizes = torch.bincount(self._keys.split).tolist()
        left = [size for group, size in enumerate(sizes) if size and group not in used]
        if not left:
            return
        why = f"`data.partition.min_examples` is {least}" if min(left) < least else ""
        if max(left) >= least:
            why += f"{' and ' if why else ''}`data.num_clients` is {self.num_clients}"
        rank_zero_info(
            f"{len(left)} of {len(left) + len(used)} groups, with {sum(left)} of {sum(sizes)} examples, are left out, "
            f"since {why}."
        )

    def client_label_counts(self, client: int) -> Tensor:
        """Count the training examples of each class of a client, int64 of shape (classes,).

        Raises:
            InvalidOption: If the labels are unknown.
        """
        if self._keys.labels is None:
            raise InvalidOption("`data.labels` is not set, but label counts need it; expected one value per example.")
        return super().client_label_counts(client)

    def _train_labels(self) -> Tensor:
        """Return the labels of the training examples, which the targets of tensors need not be."""
        return super()._train_labels() if self._own_labels is None else self._own_labels

    def client_test_dataloader(self, client: int) -> DataLoader[Any] | None:  # type: ignore[override]
        """Return a loader of a client's test data, or None without `test` and `test_fraction`."""
        return super().client_test_dataloader(client) if self._has_test else None

    def test_dataloader(self) -> DataLoader[Any] | list[Any] | None:  # type: ignore[override]
        """Return a loader of the test set, or of the clients' own test data; None (``[]`` in a ``Trainer``) without."""
        if not self._has_test:
            return no_loader(self)
        if self.test_fraction == 0:
            return super().test_dataloader()
        ready = self._ready
        own = ready.test_indices.split(ready.test_stops.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist())
        return self._eval_loader(self._gather(ready.test, own, "test"), slice(None))

    @property
    def _has_test(self) -> bool:
        return self._num_test > 0 or self.test_fraction > 0

    def _check_fractions(self) -> None:
        fraction = self.test_fraction
        fits = is_number(fraction) and 0 <= fraction < 1
        require(fits, "data.test_fraction", fraction, "a number in [0, 1)")
        require(fraction == 0 or self.test is None, "data.test_fraction", fraction, "0, since `data.test` is set")
        if not self._has_test and self.val_fraction == 0:
            raise InvalidOption(
                "`data.test` is not set, and no data is held out for the evaluation of clients; expected test data, or "
                "`data.test_fraction` or `data.val_fraction` above 0."
            )

    def _read_tensors(self) -> tuple[Part, Part] | None:
        """Return inputs and targets of tensor data sets; None for other data."""
        train = _pair(self.train)
        test = (train[0][:0], train[1][:0]) if train is not None and self.test is None else _pair(self.test)
        return None if train is None or test is None or self.collate_fn is not None else (train, test)

    def _set_facts(self, num_classes: int | None, sample_shape: tuple[int, int, int] | None) -> None:
        """Set the attributes that models may read, as far as they are known."""
        if num_classes is None and self._keys.labels is not None:
            num_classes = int(self._keys.labels.max()) + 1
        shape = None if self._tensors is None else self._tensors[0][0].shape[1:]
        if sample_shape is None and shape is not None and len(shape) == 3:
            sample_shape = (shape[0], shape[1], shape[2])
        for name, value in (("num_classes", num_classes), ("sample_shape", sample_shape)):
            if value is not None:
                setattr(self, name, value)

    def _divide(
        self, client: int, owned: Tensor, labels: Tensor, test_labels: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divide a client's examples into training, validation and, with `test_fraction`, test examples."""
        if self._num_test:
            return super()._divide(client, owned, self._keys.train, self._keys.test, rng)
        own_test = self._num_held_out(len(owned), client, "test_fraction")
        return *self._hold_out(client, owned[own_test:]), owned[:own_test]

    def _gather(self, part: Part, owned: Sequence[Tensor], use: str) -> Part:
        """Copy the examples of each client; beside those of tensors, also the labels of the training examples."""
        if use == "train" and self._tensors is not None and self._keys.labels is not None:
            self._own_labels = self._keys.labels[torch.cat(list(owned))]
        return super()._gather(part, owned, use)

    def _train_loader(self, part: Part, start: int, stop: int) -> DataLoader[Any]:
        if self._tensors is not None:
            return super()._train_loader(part, start, stop)
        items = self._items(part[0][start:stop])
        return self._item_loader(items, self.batch_size, shuffle=True, drop_last=self.drop_last)

    def _eval_loader(self, part: Part, which: slice) -> DataLoader[Any]:
        if self._tensors is not None:
            return super()._eval_loader(part, which)
        return self._item_loader(self._items(part[0][which]), self.eval_batch_size)

    def _items(self, rows: Tensor) -> ClientItems:
        shift = self.feature_shift
        wrapped = None if shift is None else ItemShift(shift, self.num_clients, self.seed_in_use(), self.high)
        return ClientItems(self.train, self.test, rows, wrapped)

    def _item_loader(self, items: ClientItems, batch_size: int, **options: Any) -> DataLoader[Any]:
        collate_fn, workers = self.collate_fn, self.num_workers
        return DataLoader(items, batch_size=batch_size, collate_fn=collate_fn, num_workers=workers, **options)

    def _shifted(self, inputs: Tensor, client: int, use: str) -> Tensor:
        """Shift tensors; in rows of numbers, note the client, whose shift :class:`ClientItems` applies."""
        if self._tensors is not None or self.feature_shift is None:
            return super()._shifted(inputs, client, use)
        return torch.stack([inputs[:, 0], torch.full_like(inputs[:, 0], client)], 1)

    def _nominal_sizes(self) -> list[int]:
        """Return 0 for sizes that are unknown before the data is split."""
        check_num_clients(self.num_clients, self.num_train)
        return [0] * self.num_clients


def _length(dataset: Any, option: str) -> int:
    """Return the length of a data set, whose first item can be read."""
    kind = type(dataset).__name__
    try:
        size = len(dataset)
    except TypeError:
        size = 0
    if size == 0:
        expected = "a data set with `__len__`, `__getitem__` and at least one example"
        found = "None" if dataset is None else f"a {kind}, which is empty or has no length"
        raise InvalidOption(f"`data.{option}` is {found}; expected {expected}.")
    try:
        dataset[0]
    except Exception as error:
        raise InvalidOption(
            f"`data.{option}` is a {kind}, whose item 0 cannot be read ({type(error).__name__}: {error}); expected a "
            "data set whose items are numbered from 0."
        ) from error
    return size


def _pair(dataset: Any) -> Part | None:
    """Return the two tensors of a data set; None if it is another one."""
    tensors = dataset.tensors if type(dataset) is TensorDataset else ()
    return (tensors[0], tensors[1]) if len(tensors) == 2 else None
