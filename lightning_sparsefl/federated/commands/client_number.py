"""The client that a command is asked for, by its number or by its name."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_sparsefl.errors import InvalidOption, nearest, require_type
from lightning_sparsefl.federated.fleet import names_of
from lightning_sparsefl.sparse.density import listed


def client_number(data: Any, client: int | str) -> int:
    """Return the number of a client.

    Args:
        data: The clients' data, which is set up; its `client_names` are optional.
        client: Number of the client, or its name, as in `names.csv` of the run folder. The command line takes digits
            as a number.

    Raises:
        InvalidOption: If no client has that name, or several have it, or it is neither a name nor a whole number.

    Example:
        >>> class Hospitals:
        ...     num_clients, client_names = 2, ["north", "south"]
        >>> client_number(Hospitals, "south"), client_number(Hospitals, 0)
        (1, 0)
        >>> client_number(Hospitals, "sout")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `client` is 'sout'; did you mean `south`?
    """
    require_type("client", client, int | str)
    names = names_of(data)
    named = [number for number, name in enumerate(names) if name == str(client)]
    if not isinstance(client, str):
        if named not in ([], [client]):
            rank_zero_warn(
                f"`client` {client} is a number; the client with the name {str(client)!r} has number {named[0]}."
            )
        return int(client)
    if len(named) == 1:
        return named[0]
    if named:
        raise InvalidOption(f"`client` is {client!r}, the name of clients {named}; expected one of these numbers.")
    expected = f"a number from 0 to {data.num_clients - 1}"
    if not names:
        raise InvalidOption(f"`client` is {client!r}, but the data names no clients; expected {expected}.")
    near = nearest(client, names)
    raise InvalidOption(
        f"`client` is {client!r}; did you mean `{near}`?"
        if near is not None
        else f"`client` is {client!r}; expected {expected}, or one of {listed(names)}."
    )
