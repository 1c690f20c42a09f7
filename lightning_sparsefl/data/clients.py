"""A federation of ordinary Lightning data modules, one per client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_sparsefl.data.examples import Examples, JoinedExamples
from lightning_sparsefl.data.federated import TRANSFERS, FederatedDataModule, no_loader
from lightning_sparsefl.errors import InvalidOption, require

_OF_ALL = (SequentialSampler, RandomSampler, WeightedRandomSampler)
"""Samplers that draw from all samples of a data set."""


class ClientDataModules(FederatedDataModule):
    """Federated data module over one ordinary LightningDataModule per client.

    Client k trains on and is evaluated with the loaders of ``modules[k]``, unchanged. Its number of training samples is
    that of an epoch of its sampler. The pooled loaders concatenate the data sets of all clients, with the batch size
    and the ``collate_fn`` of client 0. Of a data set with a ``SubsetRandomSampler`` or a list of indices they have
    these, and of one that is evaluated what its sampler draws. Costs are counted with the ``batch_size`` and
    ``drop_last`` of each client's loader, or of the batch sampler that it was given, before
    ``setup`` with the `batch_size` of its module. Every client that a run scores needs the loader of the split.

    The hooks of the batch transfer of ``modules[k]`` are called for the batches of client k, and for those of the
    pooled loaders the hooks of the first module that overrides them. A run does not call ``teardown``, and a data
    module's own `trainer` is None in a run.

    Args:
        modules: Data modules, one per client. Each is prepared, and set up once for fitting and once for testing.
        num_classes: Number of classes; None for the attribute `num_classes` of ``modules[0]``, if it has one.
        sample_shape: Channels, height and width of a sample; None for the attribute `sample_shape` of ``modules[0]``,
            if it has one.
        eval_split: Split of the clients that is evaluated during training.
        client_sizes: Number of training samples of each client, for computations before ``setup``, and for data sets
            without a length; None for unknown sizes, which read as 0 until then.

    Raises:
        InvalidOption: If `modules` is empty, or `client_sizes` has another length.

    Example:
        ::

            data = ClientDataModules([MyData(hospital) for hospital in hospitals], num_classes=3)
            FederatedTrainer(algorithm=FedAvg(), max_rounds=10).fit(MyModule(), data)
    """

    def __init__(
        self,
        modules: Sequence[L.LightningDataModule],
        *,
        num_classes: int | None = None,
        sample_shape: tuple[int, int, int] | None = None,
        eval_split: Literal["val", "test"] = "val",
        client_sizes: Sequence[int] | None = None,
    ) -> None:
        require(len(modules) > 0, "data.modules", modules, "at least one data module")
        if client_sizes is not None and len(client_sizes) != len(modules):
            raise InvalidOption(
                f"`data.client_sizes` has {len(client_sizes)} entries; expected one for each of the {len(modules)} "
                "modules."
            )
        self._given_sizes = client_sizes
        super().__init__(
            num_clients=len(modules), batch_size=getattr(modules[0], "batch_size", 1), eval_split=eval_split
        )
        self.modules = list(modules)
        self.own_batches = self._differing([(getattr(m, "batch_size", self.batch_size), False) for m in modules])
        for name, value in (("num_classes", num_classes), ("sample_shape", sample_shape)):
            known = getattr(modules[0], name, None) if value is None else value
            if known is not None:
                setattr(self, name, known)
        self._take_hooks(self.modules)
        self._is_set_up = False

    def prepare_data(self) -> None:
        """Prepare the data of each client."""
        for module in self.modules:
            module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the data of each client and count its training samples; later calls have no effect.

        Raises:
            InvalidOption: If a training data set is empty or has no length.
        """
        if self._is_set_up:
            return
        for client, module in enumerate(self.modules):
            module.trainer = self.trainer
            self._call(client, "setup", "fit")
            self._call(client, "setup", "test")
        loaders = [self.client_train_dataloader(client) for client in range(self.num_clients)]
        self.client_sizes = [self._num_samples(loader, client) for client, loader in enumerate(loaders)]
        batches = [_batches(loader, self.batch_size) for loader in loaders]
        self.batch_size, self.drop_last = batches[0]
        self.own_batches = self._differing(batches)
        self._is_set_up = True

    def teardown(self, stage: str) -> None:
        """Tear down the data module of each client."""
        for module in self.modules:
            module.teardown(stage)

    def datamodule_of(self, client: int) -> L.LightningDataModule:
        """Return this data module, with the hooks of the batch transfer of a client's own.

        Args:
            client: Number of the client.
        """
        if not any(hook in vars(self) for hook in TRANSFERS):
            return self
        view = copy.copy(self)
        view._take_hooks([self.modules[client]])
        return view

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """Return the loader of the client's own ``train_dataloader()``."""
        return _single(self._call(client, "train_dataloader"), "train_dataloader", client)

    def client_val_dataloader(self, client: int) -> DataLoader[Any] | None:
        """Return the loader of the client's own ``val_dataloader()``, or None if it does not define one."""
        if not is_overridden("val_dataloader", self.modules[client]):
            return None
        loader = self._call(client, "val_dataloader")
        return None if loader is None else _single(loader, "val_dataloader", client)

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """Return the loader of the client's own ``test_dataloader()``.

        Raises:
            InvalidOption: If the data module does not define one.
        """
        module = self.modules[client]
        if not is_overridden("test_dataloader", module):
            raise InvalidOption(
                f"The data module of client {client} has no `test_dataloader`; define one, or set "
                "`data.eval_split: val`."
            )
        return _single(self._call(client, "test_dataloader"), "test_dataloader", client)

    def client_label_counts(self, client: int) -> Tensor:
        """Count the training examples of each class of a client, by reading them once.

        Returns:
            Number of examples, int64 of shape (classes,).

        Raises:
            InvalidOption: If the number of classes is unknown, or batches have no labels.
        """
        if not hasattr(self, "num_classes"):
            raise InvalidOption(
                "`data.num_classes` is not set, but label counts need it; expected a whole number >= 1."
            )
        counts = torch.zeros(self.num_classes, dtype=torch.int64)
        for batch in self._pool([self.client_train_dataloader(client)], expands=False):
            counts += torch.bincount(self._labels_of(batch), minlength=self.num_classes)
        return counts

    def _labels_of(self, batch: Any) -> Tensor:
        """Return the labels of a batch: its second part, or what it has as ``label`` or ``labels``."""
        if isinstance(batch, Mapping):
            labels = next((batch[name] for name in ("label", "labels") if name in batch), None)
        else:
            labels = batch[1] if isinstance(batch, Sequence) and len(batch) == 2 else None
        if not isinstance(labels, Tensor) or not self._are_classes(labels):
            raise InvalidOption(
                "Label counts need batches of inputs and labels, or mappings with `label` or `labels`, of whole "
                f"numbers below `data.num_classes` = {self.num_classes}; expected such batches, or a method without "
                "label counts."
            )
        return labels.reshape(-1)

    def _are_classes(self, labels: Tensor) -> bool:
        whole = not labels.is_floating_point() and not labels.is_complex()
        return whole and bool(((labels >= 0) & (labels < self.num_classes)).all())

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data of all clients."""
        clients = range(self.num_clients)
        return self._pool([self.client_train_dataloader(client) for client in clients], shuffle=True, expands=False)

    def val_dataloader(self) -> DataLoader[Any] | list[Any] | None:
        """Return a loader of the validation data of all clients, if any; a plain ``Trainer`` gets ``[]`` for None."""
        loaders = [self.client_val_dataloader(client) for client in range(self.num_clients)]
        present = [loader for loader in loaders if loader is not None]
        return self._pool(present) if present else no_loader(self)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test data of all clients."""
        return self._pool([self.client_test_dataloader(client) for client in range(self.num_clients)])

    def _pool(self, loaders: Sequence[DataLoader[Any]], shuffle: bool = False, expands: bool = True) -> DataLoader[Any]:
        """Return a loader of what all loaders draw, with the batch size and the ``collate_fn`` of the first one.

        Args:
            loaders: Loaders of clients.
            shuffle: Whether to shuffle.
            expands: Whether samplers that do not tell their indices are asked for a draw.
        """
        first, parts = loaders[0], [_sampled(loader, expands) for loader in loaders]
        options: dict[str, Any] = {"collate_fn": first.collate_fn, "shuffle": shuffle}
        streams = [isinstance(part, IterableDataset) for part in parts]
        if any(streams):
            if not all(streams):
                raise InvalidOption(
                    f"The data set of client {streams.index(True)} is an `IterableDataset`, and that of client "
                    f"{streams.index(False)} is not; expected one kind for all clients."
                )
            return DataLoader(ChainDataset(parts), batch_size=first.batch_size, collate_fn=first.collate_fn)
        size = _batches(first, self.batch_size)[0]
        if first.batch_sampler is None:  # an item of its data set is a batch, or a list of indices gets one
            items = _Batches(parts, size) if isinstance(first.sampler, BatchSampler) else ConcatDataset(parts)
            return DataLoader(items, batch_size=None, **options)
        if all(isinstance(part, Examples) for part in parts):
            return JoinedExamples(parts).loader(size, shuffle=shuffle)
        return DataLoader(ConcatDataset(parts), batch_size=size, **options)

    def _take_hooks(self, modules: Sequence[L.LightningDataModule]) -> None:
        """Take each hook of the batch transfer from the first data module that overrides it."""
        for hook in TRANSFERS:
            vars(self).pop(hook, None)
            owner = next((module for module in modules if is_overridden(hook, module)), None)
            if owner is not None:
                setattr(self, hook, getattr(owner, hook))

    def _call(self, client: int, hook: str, *args: Any) -> Any:
        """Call a hook of a client's data module; one that needs a trainer is named."""
        module = self.modules[client]
        try:
            return getattr(module, hook)(*args)
        except AttributeError as error:
            if error.name is None or error.obj is not None or module.trainer is not None:
                raise
            raise InvalidOption(
                f"`{hook}` of the data module of client {client} reads `{error.name}` of None; expected a hook that "
                "does not need `self.trainer`, which is None in a federation (each client trains in one process)."
            ) from error

    def _num_samples(self, loader: DataLoader[Any], client: int) -> int:
        """Return the number of samples of an epoch of a client's training loader."""
        source: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else _sampler(loader)
        if isinstance(source, list | tuple):
            source = _indices_in(source)
        if not hasattr(source, "__len__"):
            source = loader.dataset
        known = 0 if self._given_sizes is None else self._given_sizes[client]
        has_length = hasattr(loader.dataset, "__len__")
        size = len(source) if has_length else known
        if size == 0:
            advice = "leave the client out" if has_length else "or give its number of samples in `data.client_sizes`"
            raise InvalidOption(
                f"The training data set of client {client} {'is empty' if has_length else 'has no length'}; expected a "
                f"data set with `__len__` and at least one sample; {advice}."
            )
        return size

    def _differing(self, batches: Sequence[tuple[int, bool]]) -> dict[int, tuple[int, bool]]:
        """Return batch size and `drop_last` of the clients that do not have those of the data module."""
        return {client: own for client, own in enumerate(batches) if own != (self.batch_size, self.drop_last)}

    def _nominal_sizes(self) -> list[int]:
        return [0] * self.num_clients if self._given_sizes is None else list(self._given_sizes)


def _single(loader: Any, hook: str, client: int) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise InvalidOption(
            f"`{hook}` of the data module of client {client} returns a {type(loader).__name__}; expected a single "
            "DataLoader."
        )
    return loader


class _Batches(Dataset[Any]):
    """Batches of several data sets whose items for a list of indices are a batch.

    Args:
        parts: Data sets.
        size: Number of samples of a batch.
    """

    def __init__(self, parts: Sequence[Any], size: int) -> None:
        self._batches = [(part, rows.tolist()) for part in parts for rows in torch.arange(len(part)).split(size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Any:
        part, rows = self._batches[number]
        return part[rows]


def _source(loader: DataLoader[Any]) -> Any:
    """Return what yields the indices or the batches of indices of a loader."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler behind a loader's batches, or the list of indices or batches that it was given."""
    source = _source(loader)
    return getattr(source, "sampler", source if isinstance(source, list | tuple) else loader.sampler)


def _sampled(loader: DataLoader[Any], expands: bool) -> Dataset[Any]:
    """Return the data set of a loader, or the part of it that its sampler draws."""
    dataset: Any = loader.dataset
    rows = None if isinstance(dataset, IterableDataset) else _drawn(loader, expands)
    if rows is None:
        return dataset  # type: ignore[no-any-return]
    if type(dataset) is Examples:
        return Examples(dataset.inputs[rows], dataset.labels[rows], dataset.transform)
    return Subset(dataset, rows)


def _drawn(loader: DataLoader[Any], expands: bool) -> list[int] | None:
    """Return the indices that a loader draws; None for those of all samples.

    Args:
        loader: Loader of a data set with items.
        expands: Whether a sampler that does not tell its indices is asked for a draw.
    """
    source, sampler = _source(loader), _sampler(loader)
    if isinstance(sampler, list | tuple):
        return _indices_in(sampler)
    if hasattr(sampler, "indices"):
        return list(sampler.indices)
    knows = source is sampler or hasattr(source, "sampler")  # whether the batches are made of the sampler's indices
    if not expands or (knows and isinstance(sampler, _OF_ALL)):
        return None
    with isolate_rng():
        return _indices_in(source)


def _indices_in(drawn: Any) -> list[int]:
    """Return the indices in indices, or in batches of indices."""
    return [int(index) for each in drawn for index in np.ravel(each)]


def _batches(loader: DataLoader[Any], default: int) -> tuple[int, bool]:
    """Return the batch size of a loader, or of the batch sampler that it was given, and its `drop_last`."""
    source = _source(loader)
    if isinstance(source, list | tuple) and loader.batch_sampler is not None:  # of batches
        return np.size(source[0]) if source else default, False
    if loader.batch_sampler is None and not isinstance(source, BatchSampler):
        source = loader
    return getattr(source, "batch_size", None) or default, getattr(source, "drop_last", False)
