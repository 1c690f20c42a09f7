"""The client that a command is asked for, by its number or by its name."""

from __future__ import annotations

from typing import Any

from lightning_sparsefl.errors import InvalidOption, nearest
from lightning_sparsefl.sparse.density import listed


def client_number(data: Any, client: int | str) -> int:
    """Return the number of a client.

    Args:
        data: The clients' data, which is set up; its `client_names` are optional.
        client: Number of the client, or its name, as in `names.csv` of the run folder.

    Raises:
        InvalidOption: If no client has that name, or several have it.

    Example:
        >>> class Hospitals:
        ...     num_clients, client_names = 2, ["north", "south"]
        >>> client_number(Hospitals, "south"), client_number(Hospitals, 0)
        (1, 0)
        >>> client_number(Hospitals, "sout")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `client` is 'sout'; did you mean `south`?
    """
    if not isinstance(client, str):
        return client
    names = [str(name) for name in getattr(data, "client_names", None) or ()]
    numbers = [number for number, name in enumerate(names) if name == client]
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        raise InvalidOption(f"`client` is {client!r}, the name of clients {numbers}; expected one of these numbers.")
    if not names:
        expected = f"a number from 0 to {data.num_clients - 1}"
        raise InvalidOption(f"`client` is {client!r}, but the data names no clients; expected {expected}.")
    near = nearest(client, names)
    raise InvalidOption(
        f"`client` is {client!r}; did you mean `{near}`?"
        if near is not None
        else f"`client` is {client!r}; expected a number from 0 to {len(names) - 1}, or one of {listed(names)}."
    )
