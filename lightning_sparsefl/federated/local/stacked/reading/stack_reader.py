"""The batches of several clients, read together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples
from lightning_sparsefl.federated.local.stacked.reading.reader import ClientReader, ExamplesReader
from lightning_sparsefl.federated.local.stacked.rules import address
from lightning_sparsefl.federated.local.stacked.states.leaves import layout_of, map_tensors, stack_trees


def equal_ranges(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the ranges of neighbours with equal keys, from the first one to before the last one.

    Args:
        keys: One key for each client.

    Example:
        >>> equal_ranges([3, 3, 1])
        [(0, 2), (2, 3)]
    """
    return list(pairwise([0, *(place for place in range(1, len(keys)) if keys[place] != keys[place - 1]), len(keys)]))


class StackReader:
    """Reader of several clients' batches.

    Args:
        readers: Readers of the clients, with equal keys.
    """

    def __init__(self, readers: Sequence[ClientReader]) -> None:
        self.readers = readers

    def start_epoch(self) -> None:
        """Draw the order of an epoch for each client, apart from the random numbers of the steps, such as dropout's."""
        with torch.random.fork_rng(devices=[]):
            for reader in self.readers:
                reader.start_epoch()

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

    def read(self, low: int, high: int, number: int) -> Iterator[tuple[int, int, Any]]:
        """Read a batch of equal size from each of several clients.

        Args:
            low: First client.
            high: Client after the last one.
            number: Number of the batch, from 0.

        Yields:
            First client, client after the last one, and their batches with the clients in dimension 0: of all, or of
            neighbours whose batches have the same layout.
        """
        with torch.random.fork_rng(devices=[]):
            trees = [reader.read(number) for reader in self.readers[low:high]]
        for first, end in equal_ranges([layout_of(tree) for tree in trees]):
            yield low + first, low + end, stack_trees(trees[first:end])


class ExamplesStackReader(StackReader):
    """Reader of several clients' batches of two tensors, with one index for all where their samples share a storage.

    Args:
        readers: Readers of the clients, with equal keys.
        samples: Copies of the samples on the device.
    """

    readers: Sequence[ExamplesReader]

    def __init__(self, readers: Sequence[ExamplesReader], samples: DeviceSamples) -> None:
        super().__init__(readers)
        self._examples: Sequence[Examples] = samples.of([reader.examples for reader in readers])
        inputs = _common_rows([examples.inputs for examples in self._examples])
        labels = _common_rows([examples.labels for examples in self._examples])
        self._common = None
        if inputs is not None and labels is not None and inputs[1] == labels[1]:
            self._common = (inputs[0], labels[0])
            self._first = torch.tensor(inputs[1])[:, None]
        self._orders = torch.empty(0, 0, dtype=torch.int64)

    def start_epoch(self) -> None:
        """Draw the order of an epoch for each client; see :meth:`StackReader.start_epoch`."""
        super().start_epoch()
        if self._common is not None:
            orders = [torch.cat(tuple(reader.order)) for reader in self.readers]
            self._orders = (pad_sequence(orders, batch_first=True) + self._first).to(self._common[1].device)

    def read(self, low: int, high: int, number: int) -> Iterator[tuple[int, int, Any]]:
        """Read a batch of each client, inputs (clients, samples, ...) and labels; see :meth:`StackReader.read`."""
        readers = self.readers[low:high]
        if readers[0].draws:
            yield from super().read(low, high, number)
            return
        size = (high - low, len(readers[0].order[number]))
        stacked, targets = (part.unflatten(0, size) for part in self._select(low, high, number))
        transform = self._examples[low].transform
        yield (
            low,
            high,
            ((stacked if transform is None else transform(stacked.flatten(0, 1)).unflatten(0, size)), targets),
        )

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
    if not row or len(set(map(address, tensors))) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    starts = [int(tensor.storage_offset()) for tensor in tensors]
    lowest = min(starts)
    if any((start - lowest) % row for start in starts):
        return None
    rows = max((start - lowest) // row + len(tensor) for start, tensor in zip(starts, tensors, strict=True))
    common = first.as_strided((rows * row,), (1,), lowest).view(rows, *first.shape[1:])
    return common, [(start - lowest) // row for start in starts]


def samples_of(batch: Any) -> int:
    """Return the number of samples in each client's part of a batch, as `self.log` counts them for one client.

    Args:
        batch: Batch whose tensors have the clients in dimension 0.

    Example:
        >>> samples_of({"x": torch.zeros(2, 5, 3)})
        5
    """
    if type(batch) is tuple and batch and isinstance(batch[0], Tensor) and batch[0].dim() > 1:  # as of `Examples`
        return batch[0].shape[1]
    return extract_batch_size(map_tensors(batch, lambda tensor: tensor[0]))


def stack_reader(readers: Sequence[ClientReader], samples: DeviceSamples) -> StackReader:
    """Return the reader of several clients' batches.

    Args:
        readers: Readers of the clients, with equal keys.
        samples: Copies of samples on the device.
    """
    examples = [reader for reader in readers if isinstance(reader, ExamplesReader)]
    return ExamplesStackReader(examples, samples) if len(examples) == len(readers) else StackReader(readers)
