"""The batches of one client of a stack, which are those that the client's own loader would give."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_sparsefl.data.examples import Examples, Normalize, order_of
from lightning_sparsefl.data.items import ClientItems
from lightning_sparsefl.federated.exchange.failures import in_brief, is_out_of_memory
from lightning_sparsefl.federated.local.fast.batches import num_batches
from lightning_sparsefl.federated.local.stacked.logs import NotStackable


def name_of_data(loader: Any) -> str:
    """Return the name of the class of the data that a loader reads, as its user knows it.

    Args:
        loader: Loader of any kind.
    """
    dataset = getattr(loader, "dataset", loader)
    return type(dataset.train if isinstance(dataset, ClientItems) else dataset).__name__


class ClientReader:
    """Reader of one client's batches, in an order drawn from the client's own random numbers.

    Create it right after the loader, when the global generator is in the state of the client's key.

    Args:
        loader: Loader that :func:`~lightning_sparsefl.data.examples.reads_here` accepts.
        limit: Option `trainer.limit_train_batches`.
    """

    draws = True
    """Whether a batch may draw random numbers, as for random crops."""
    transform: Any = None
    """Transform of whole batches; None without one."""

    def __init__(self, loader: Any, limit: int | float) -> None:
        self.loader = loader
        self.batches = num_batches(RunningStage.TRAINING, len(loader), limit)
        self.num_examples = len(loader.dataset)
        self._batch_size: int = loader.batch_sampler.batch_size
        self._first = self._random = torch.get_rng_state()
        self.order: Sequence[Tensor] = ()
        """Indices of each batch of the epoch."""

    @property
    def key(self) -> Hashable:
        """What must agree for clients to be read together; whether their batches do shows when they are read."""
        return "items"

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
        self.order = order_of(self.loader.batch_sampler.sampler).split(self._batch_size)[: self.batches]
        self._random = torch.get_rng_state()

    def start(self, number: int) -> int:
        """Return the place of a batch's first sample in the order of the epoch.

        Args:
            number: Number of the batch, from 0.
        """
        return number * self._batch_size

    def read(self, number: int) -> Any:
        """Read a batch, with the client's own random numbers as the global ones.

        Args:
            number: Number of the batch, from 0.

        Raises:
            NotStackable: If the data set or its `collate_fn` raises an error, which the client raises again alone.
        """
        torch.set_rng_state(self._random)
        try:
            batch = self._fetch(self.order[number])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotStackable(f"gets no batch of `{name_of_data(self.loader)}` ({in_brief(error)})") from error
        self._random = torch.get_rng_state()
        return batch

    def _fetch(self, indices: Tensor) -> Any:
        """Return a batch as a DataLoader does."""
        dataset, numbers = self.loader.dataset, indices.tolist()
        fetch = getattr(dataset, "__getitems__", None)
        return self.loader.collate_fn(fetch(numbers) if fetch else [dataset[number] for number in numbers])


class ExamplesReader(ClientReader):
    """Reader of samples that are two tensors, of which batches of several clients are read with one index.

    Args:
        loader: Loader that :meth:`.Examples.are_read_by` accepts.
        limit: Option `trainer.limit_train_batches`.
    """

    def __init__(self, loader: Any, limit: int | float) -> None:
        super().__init__(loader, limit)
        self.examples: Examples = loader.dataset
        self.transform = self.examples.transform
        self.draws = self.transform is not None and type(self.transform) is not Normalize

    @property
    def key(self) -> Hashable:
        """What must agree for clients to be read together."""
        return reading_key(self.examples)

    def _fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.examples.__getitems__(indices)


def reader_of(loader: Any, limit: int | float) -> ClientReader:
    """Return the reader of a loader.

    Args:
        loader: Loader that :func:`~lightning_sparsefl.data.examples.reads_here` accepts.
        limit: Option `trainer.limit_train_batches`.
    """
    return (ExamplesReader if Examples.are_read_by(loader) else ClientReader)(loader, limit)


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
