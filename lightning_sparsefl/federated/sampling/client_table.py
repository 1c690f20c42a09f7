"""What a sampler keeps of each client, as one tensor for each kind of value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CLIENT = "client"


class ClientTable:
    """Columns of values, with a row for each known client in ascending order of the clients' numbers.

    The state of a sampler is copied, compared between ranks and written in each round. This takes milliseconds for the
    few tensors of a table, and seconds for a mapping with an entry for each of 100,000 clients.

    Args:
        clients: Numbers of the clients in ascending order.
        columns: Values of these clients, by the name of the column.

    Example:
        >>> table = ClientTable.empty(last=np.int64).updated(np.array([2, 7]), last=[4, 4])
        >>> table = table.updated(np.array([3, 7]), last=[5, 5])
        >>> table.clients.tolist(), table["last"].tolist()
        ([2, 3, 7], [4, 5, 5])
    """

    def __init__(self, clients: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> None:
        self.clients, self._columns = clients, columns

    @classmethod
    def empty(cls, **kinds: type) -> ClientTable:
        """Return a table without clients.

        Args:
            kinds: Type of the values of each column.
        """
        return cls(np.empty(0, np.int64), {name: np.empty(0, kind) for name, kind in kinds.items()})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Tensor]) -> ClientTable:
        """Return the table that :meth:`to_plain` has converted.

        Args:
            plain: Tensors on any device.
        """
        columns = {name: tensor.cpu().numpy() for name, tensor in plain.items()}
        return cls(columns.pop(_CLIENT), columns)

    def to_plain(self) -> dict[str, Tensor]:
        """Return the table as tensors, for the state of a sampler."""
        columns = {_CLIENT: self.clients, **self._columns}
        return {name: _tensor(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def knows(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which clients have a row.

        Args:
            clients: Numbers of clients in any order.
        """
        return self._places(clients)[1]

    def values(self, clients: NDArray[np.int64], name: str, missing: float = 0) -> NDArray[Any]:
        """Return the values of clients in a column.

        Args:
            clients: Numbers of clients in any order.
            name: Name of the column.
            missing: Value of clients without a row.
        """
        places, known = self._places(clients)
        found = np.full(len(clients), missing, self[name].dtype)
        found[known] = self[name][places[known]]
        return found

    def _places(self, clients: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of clients, and which clients have one."""
        places = np.searchsorted(self.clients, clients)
        known = places < len(self)
        known[known] = self.clients[places[known]] == clients[known]
        return places, known

    def updated(self, clients: NDArray[np.int64], **columns: Any) -> ClientTable:
        """Return a table in which the rows of clients are added or replaced.

        Args:
            clients: Numbers of the clients in ascending order.
            columns: Values of these clients, for each column.
        """
        new = ~self.knows(clients)
        before = np.searchsorted(self.clients, clients[new])
        merged = np.insert(self.clients, before, clients[new])
        places, found = np.searchsorted(merged, clients), dict[str, NDArray[Any]]()
        for name, column in self._columns.items():
            values = np.asarray(columns[name], column.dtype)
            found[name] = np.insert(column, before, values[new])
            found[name][places] = values
        return ClientTable(merged, found)


def _tensor(values: NDArray[Any]) -> Tensor:
    """Return an array as a tensor whose bytes can be read: an empty array has a stride of 0, which `view` refuses."""
    tensor = torch.from_numpy(values)
    return tensor if len(values) else tensor.new_empty(0)
