"""Iteration over the batches of one loader, for the fast engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch.utils.data import DataLoader

from lightning_sparsefl.data.examples import Examples, order_of
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.fast.support import unsupported_loader_reason


def iterate_examples(loader: DataLoader[Any], examples: Examples) -> Iterator[Any]:
    """Start a pass over a loader of :class:`Examples`, with the batches and random numbers of ``iter(loader)``.

    All indices become one tensor, which takes less time than one tensor for each batch.

    Args:
        loader: Loader that :meth:`Examples.are_read_by` accepts.
        examples: Samples of the loader, there or on a device.
    """
    torch.empty((), dtype=torch.int64).random_()  # the seed that a DataLoader draws for its workers
    return _read(loader, examples)


def _read(loader: DataLoader[Any], examples: Examples) -> Iterator[Any]:
    order = order_of(loader.batch_sampler.sampler)  # type: ignore[union-attr]  # drawn with the first batch, as by a DataLoader
    order = order.to(examples.labels.device)
    for indices in order.split(loader.batch_sampler.batch_size)[: len(loader)]:  # type: ignore[union-attr]
        yield examples.__getitems__(indices)


def num_batches(stage: RunningStage, length: int | float, limit: int | float) -> int:
    """Return the number of batches of a pass, by the rules of Lightning.

    Args:
        stage: Stage that the batches are for.
        length: Number of batches of the loader.
        limit: Limit on the batches: a number (int), or a fraction (float) of them.

    Raises:
        InvalidOption: If the fraction is less than one batch.

    Example:
        >>> num_batches(RunningStage.TRAINING, 3, 2), num_batches(RunningStage.TRAINING, 3, 0.5)
        (2, 1)
    """
    if isinstance(limit, float) and 0 < limit * length < 1:
        raise InvalidOption(
            f"`trainer.limit_{stage.dataloader_prefix}_batches` is {limit}, less than one of a client's {length} "
            f"{'batch' if length == 1 else 'batches'}; expected a whole number, or a fraction of at least "
            f"{math.ceil(100 / length) / 100}."
        )
    return int(_parse_num_batches(stage, length, limit))


class OneBatch:
    """Loader that yields one given batch.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._batch


class BatchIterator:
    """Iterator over the batches of one loader, counted and moved to the device as Lightning does.

    Args:
        trainer: Trainer of this client.
        loader: Loader of the client's batches.
        stage: Stage that the batches are for.
        limit: Limit on the batches: `limit_train_batches`, `limit_val_batches` or `limit_test_batches`.

    Raises:
        InvalidOption: If only a real Trainer supports this kind of loader.
    """

    def __init__(self, trainer: Any, loader: Any, stage: RunningStage, limit: int | float) -> None:
        reason = unsupported_loader_reason(loader)
        if reason is not None:
            raise InvalidOption(f"Clients cannot train: {reason}; set `federation.local_engine: trainer`.")
        if not isinstance(loader, DataLoader):
            iter(loader)  # Lightning calls `iter` once more, which may draw random numbers
        _auto_add_worker_init_fn(loader, 0)
        self.loader, self.length = loader, num_batches(stage, len(loader), limit)
        self._trainer, self._plugin, self._hooks = trainer, trainer.precision_plugin, trainer.hooks
        self._iterator: Iterator[Any] = iter(())
        self._fetched = 0
        self.done = False

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to a sampler that shuffles by epoch."""
        _set_sampler_epoch(self.loader, epoch)

    def start(self) -> None:
        """Start a pass over the loader."""
        self._iterator = self._start()
        self._fetched, self.done = 0, self.length == 0

    def _start(self) -> Iterator[Any]:
        if not Examples.are_read_by(self.loader):
            return iter(self.loader)
        return iterate_examples(self.loader, *self._trainer.device_samples.of([self.loader.dataset]))

    def __next__(self) -> Any:
        """Return the next batch, moved to the device."""
        if self._fetched >= self.length:
            raise StopIteration
        batch = next(self._iterator)
        self._fetched += 1
        self.done = self._fetched >= self.length
        batch = self._plugin.convert_input(batch)
        return self._hooks.to_device(batch, self._trainer.strategy.root_device)

    def close(self) -> None:
        """Stop the loader's workers."""
        self._iterator = iter(())
        _shutdown_workers_and_reset_iterator(self.loader)
