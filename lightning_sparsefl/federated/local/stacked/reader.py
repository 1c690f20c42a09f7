"""The batches of several clients, those that each client's own loader would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_sparsefl.data.examples import Examples, Normalize


def readable(loader: Any) -> bool:
    """Return whether :class:`ClientReader` can read a loader.

    Args:
        loader: Loader of a client.
    """
    return Examples.are_read_by(loader)


class ClientReader:
    """Order of one client's batches, drawn from its own random numbers.

    Create it right after the loader, when the global generator is in the state of the client's key.

    Args:
        loader: Loader that is :func:`readable`.
        limit: Option `trainer.limit_train_batches`.
    """

    def __init__(self, loader: Any, limit: int | float) -> None:
        self.examples: Examples = loader.dataset
        self.batches = int(_parse_num_batches(RunningStage.TRAINING, len(loader), limit))
        self.num_examples = len(self.examples)
        self._loader = loader
        self._random = torch.get_rng_state()
        transform = self.examples.transform
        self._draws = transform is not None and type(transform) is not Normalize
        self.order: Sequence[Tensor] = ()
        """Indices of each batch of the epoch."""

    @property
    def draws(self) -> bool:
        """Whether each batch draws random numbers, as for random crops."""
        return self._draws

    def start_epoch(self) -> None:
        """Draw the order of an epoch."""
        torch.set_rng_state(self._random)
        torch.empty((), dtype=torch.int64).random_()  # the seed that a DataLoader draws for its workers
        batches = list(self._loader.batch_sampler)
        order = torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)
        self.order = order.split([len(batch) for batch in batches])[: self.batches]
        self._random = torch.get_rng_state()

    def size(self, number: int) -> int:
        """Return the number of samples of a batch of the epoch; 0 after the last one.

        Args:
            number: Number of the batch, from 0.
        """
        return len(self.order[number]) if number < len(self.order) else 0

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Read a batch whose transform draws random numbers.

        Args:
            number: Number of the batch, from 0.
        """
        torch.set_rng_state(self._random)
        batch = self.examples.__getitems__(self.order[number])
        self._random = torch.get_rng_state()
        return batch


def read_batch(readers: Sequence[ClientReader], number: int) -> tuple[Tensor, Tensor]:
    """Read a batch of equal size from each of several clients.

    Args:
        readers: Readers of the clients.
        number: Number of the batch, from 0.

    Returns:
        Inputs of shape (clients, samples, ...) and labels of shape (clients, samples).
    """
    if readers[0].draws:
        inputs, labels = zip(*(reader.read(number) for reader in readers), strict=True)
        return torch.stack(inputs), torch.stack(labels)
    first, indices = readers[0].examples, readers[0].order[number]
    size = (len(readers), len(indices))
    stacked = first.inputs.new_empty(*size, *first.inputs.shape[1:])
    targets = first.labels.new_empty(*size, *first.labels.shape[1:])
    for place, reader in enumerate(readers):
        chosen = reader.order[number]
        torch.index_select(reader.examples.inputs, 0, chosen, out=stacked[place])
        torch.index_select(reader.examples.labels, 0, chosen, out=targets[place])
    if first.transform is not None:
        stacked = first.transform(stacked.flatten(0, 1)).unflatten(0, size)
    return stacked, targets


def reading_key(reader: ClientReader) -> tuple[Any, ...]:
    """Return what must agree for clients to be read together.

    Args:
        reader: Reader of a client.
    """
    examples, transform = reader.examples, reader.examples.transform
    kind: tuple[Any, ...] = (type(transform),)
    if isinstance(transform, Normalize):
        kind += (*transform.scale.flatten().tolist(), *transform.shift.flatten().tolist())
    return (examples.inputs.shape[1:], examples.inputs.dtype, examples.labels.dtype, kind)
