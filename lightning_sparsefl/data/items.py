"""Items of any data set, as clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sparsefl.data.feature_shift import FeatureShift
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator


@dataclass(frozen=True)
class ItemShift:
    """Feature shift of single items, whose random draws depend on the seed, the client and the item alone.

    Args:
        shift: Feature shift.
        num_clients: Number of clients.
        seed: Random seed.
        high: Value of an uint8 input that is scaled to 1.
    """

    shift: FeatureShift
    num_clients: int
    seed: int
    high: float

    def __call__(self, item: Any, client: int, number: int) -> Any:
        """Shift the input of an item ``(input, ...)``.

        Args:
            item: Item of the data set.
            client: Number of the client that reads it.
            number: Number of the item.

        Raises:
            InvalidOption: If the item does not start with a tensor.
        """
        if not (isinstance(item, tuple | list) and item and isinstance(item[0], Tensor)):
            raise InvalidOption(
                f"`data.feature_shift` is {self.shift}, but an item is a {type(item).__name__}; expected a tuple that "
                "starts with a tensor."
            )
        rng = generator(self.seed, "feature shift", client, number)
        shifted = self.shift(item[0][None], client / self.num_clients, rng, self.high)[0]
        return (shifted, *item[1:])


class ClientItems(Dataset[Any]):
    """Some items of the training and the test data, in the order of their rows.

    Args:
        train: Training data.
        test: Test data, whose items are numbered after those of the training data; None for no test data.
        rows: Number of each item, and that of the client that reads it, int64 of shape (items, 2).
        shift: Feature shift of the items; None for no shift.
    """

    def __init__(self, train: Any, test: Any, rows: Tensor, shift: ItemShift | None = None) -> None:
        self.train, self.test, self.rows, self.shift = train, test, rows, shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows: list[list[int]] = self.rows[torch.as_tensor(indices)].tolist()
        first = len(self.train)  # a batch is of one of the two
        dataset, offset = (self.train, 0) if rows[0][0] < first else (self.test, first)
        items = _fetch(dataset, [number - offset for number, _ in rows])
        if self.shift is None:
            return items
        return [self.shift(item, client, number) for item, (number, client) in zip(items, rows, strict=True)]


def _fetch(dataset: Any, numbers: list[int]) -> list[Any]:
    """Return items, all at once if the data set can do so."""
    fetch = getattr(dataset, "__getitems__", None)
    items = fetch(numbers) if callable(fetch) else None
    return items if isinstance(items, list) else [dataset[number] for number in numbers]
