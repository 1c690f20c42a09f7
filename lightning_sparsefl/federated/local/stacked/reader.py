"""The batches of several clients, those that each client's own loader would give."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_sparsefl.data.examples import Examples, Normalize, order_of
from lightning_sparsefl.data.items import ClientItems
from lightning_sparsefl.federated.local.fast.batches import num_batches
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples


def readable(loader: Any) -> bool:
    """Return whether :class:`ClientReader` can read a loader.

    Args:
        loader: Loader of a client.
    """
    return Examples.are_read_by(loader)


def equal_ranges(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the ranges of neighbours with equal keys, from the first one to before the last one.

    Args:
        keys: One key for each client.

    Example:
        >>> equal_ranges([3, 3, 1])
        [(0, 2), (2, 3)]
    """
    return list(pairwise([0, *(place for place in range(1, len(keys)) if keys[place] != keys[place - 1]), len(keys)]))


def name_of_data(loader: Any) -> str:
    """Return the name of the class of the data that a loader reads, as its user knows it.

    Args:
        loader: Loader of any kind.
    """
    dataset = getattr(loader, "dataset", loader)
    return type(dataset.train if isinstance(dataset, ClientItems) else dataset).__name__


class ClientReader:
    """Order of one client's batches, drawn from its own random numbers.

    Create it right after the loader, when the global generator is in the state of the client's key.

    Args:
        loader: Loader that is :func:`readable`.
        limit: Option `trainer.limit_train_batches`.
    """

    def __init__(self, loader: Any, limit: int | float) -> None:
        self.examples: Examples = loader.dataset
        self.batches = num_batches(RunningStage.TRAINING, len(loader), limit)
        self.num_examples = len(self.examples)
        self._batches = loader.batch_sampler
        self._batch_size: int = self._batches.batch_size
        self._first = self._random = torch.get_rng_state()
        transform = self.examples.transform
        self._draws = transform is not None and type(transform) is not Normalize
        self.order: Sequence[Tensor] = ()
        """Indices of each batch of the epoch."""

    @property
    def draws(self) -> bool:
        """Whether each batch draws random numbers, as for random crops."""
        return self._draws

    @property
    def batch_samples(self) -> int:
        """Number of samples in the first batch."""
        return min(self._batch_size, self.num_examples)

    def rewind(self) -> None:
        """Begin again with the first epoch, for a stack that is fitted again."""
        self._random = self._first

    def start_epoch(self) -> None:
        """Draw the order of an epoch."""
        torch.set_rng_state(self._random)
        torch.empty((), dtype=torch.int64).random_()  # the seed that a DataLoader draws for its workers
        self.order = order_of(self._batches.sampler).split(self._batch_size)[: self.batches]
        self._random = torch.get_rng_state()

    def start(self, number: int) -> int:
        """Return the place of a batch's first sample in the order of the epoch.

        Args:
            number: Number of the batch, from 0.
        """
        return number * self._batch_size

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Read a batch whose transform draws random numbers.

        Args:
            number: Number of the batch, from 0.
        """
        torch.set_rng_state(self._random)
        batch = self.examples.__getitems__(self.order[number])
        self._random = torch.get_rng_state()
        return batch


class StackReader:
    """Reader of several clients' batches, with one index for all of them where their examples share a storage.

    Args:
        readers: Readers of the clients, whose examples have equal :func:`reading_key`.
        samples: Copies of the samples on the device.
    """

    def __init__(self, readers: Sequence[ClientReader], samples: DeviceSamples) -> None:
        self.readers, self._examples = readers, samples.of([reader.examples for reader in readers])
        inputs = _common_rows([examples.inputs for examples in self._examples])
        labels = _common_rows([examples.labels for examples in self._examples])
        self._common = None
        if inputs is not None and labels is not None and inputs[1] == labels[1]:
            self._common = (inputs[0], labels[0])
            self._first = torch.tensor(inputs[1])[:, None]
        self._orders = torch.empty(0, 0, dtype=torch.int64)

    def start_epoch(self) -> None:
        """Draw the order of an epoch for each client, apart from the random numbers of the steps, such as dropout's."""
        with torch.random.fork_rng(devices=[]):
            for reader in self.readers:
                reader.start_epoch()
        if self._common is not None:
            orders = [torch.cat(tuple(reader.order)) for reader in self.readers]
            self._orders = (pad_sequence(orders, batch_first=True) + self._first).to(self._common[1].device)

    def runs(self, phases: Sequence[Hashable]) -> Iterator[tuple[range, list[tuple[int, int]]]]:
        """Divide an epoch into runs of batches in which the same clients step together.

        Args:
            phases: Key of each client, which must agree for clients to step together.

        Yields:
            Numbers of the batches of a run, and its ranges of clients, from the first one to before the last one, whose
            batches have equal sizes and whose phases agree.
        """
        sizes = [[len(batch) for batch in reader.order] for reader in self.readers]
        changes = {place for own in sizes for place, (a, b) in enumerate(pairwise([*own, 0]), 1) if a != b}
        for first, end in pairwise(sorted({0, *changes})):
            keys = [(own[first] if first < len(own) else 0, phase) for own, phase in zip(sizes, phases, strict=True)]
            yield range(first, end), [(low, high) for low, high in equal_ranges(keys) if keys[low][0]]

    def read(self, low: int, high: int, number: int) -> tuple[Tensor, Tensor]:
        """Read a batch of equal size from each of several clients.

        Args:
            low: First client.
            high: Client after the last one.
            number: Number of the batch, from 0.

        Returns:
            Inputs of shape (clients, samples, ...) and labels of shape (clients, samples).
        """
        readers = self.readers[low:high]
        if readers[0].draws:
            with torch.random.fork_rng(devices=[]):
                inputs, labels = zip(*(reader.read(number) for reader in readers), strict=True)
            return torch.stack(inputs), torch.stack(labels)
        size = (high - low, len(readers[0].order[number]))
        stacked, targets = (part.unflatten(0, size) for part in self._select(low, high, number))
        transform = self._examples[low].transform
        return (stacked if transform is None else transform(stacked.flatten(0, 1)).unflatten(0, size)), targets

    def _select(self, low: int, high: int, number: int) -> tuple[Tensor, Tensor]:
        """Return the examples of a batch of each client, one client after another."""
        readers = self.readers[low:high]
        starts = {reader.start(number) for reader in readers}
        if self._common is not None and len(starts) == 1:
            start = starts.pop()
            chosen = self._orders[low:high, start : start + len(readers[0].order[number])].reshape(-1)
            inputs, labels = self._common
            return inputs.index_select(0, chosen), labels.index_select(0, chosen)
        examples = [
            (examples, reader.order[number].to(examples.labels.device))
            for examples, reader in zip(self._examples[low:high], readers, strict=True)
        ]
        return (
            torch.cat([own.inputs.index_select(0, chosen) for own, chosen in examples]),
            torch.cat([own.labels.index_select(0, chosen) for own, chosen in examples]),
        )


def _common_rows(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """Return a tensor of which all others are slices, and the place of the first row of each; None without one.

    Args:
        tensors: Tensors of equal type, and of equal shape but for dimension 0.
    """
    first, row = tensors[0], math.prod(tensors[0].shape[1:])
    storage = first.untyped_storage().data_ptr()
    if not row or any(t.untyped_storage().data_ptr() != storage or not t.is_contiguous() for t in tensors):
        return None
    starts = [int(tensor.storage_offset()) for tensor in tensors]
    lowest = min(starts)
    if any((start - lowest) % row for start in starts):
        return None
    rows = max((start - lowest) // row + len(tensor) for start, tensor in zip(starts, tensors, strict=True))
    common = first.as_strided((rows * row,), (1,), lowest).view(rows, *first.shape[1:])
    return common, [(start - lowest) // row for start in starts]


def reading_key(examples: Examples) -> tuple[Any, ...]:
    """Return what must agree for clients to be read together.

    Args:
        examples: Samples of a client.
    """
    transform = examples.transform
    kind: tuple[Any, ...] = (type(transform),)
    if isinstance(transform, Normalize):
        kind += (*transform.scale.flatten().tolist(), *transform.shift.flatten().tolist())
    return (examples.inputs.shape[1:], examples.inputs.dtype, examples.labels.dtype, kind)
