"""Clients that a command names by what their groups in the data are called."""

import numpy as np
import pytest

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.commands.client_number import client_number


class Fleet:
    num_clients = 3
    client_names = ("north", "south", "south")


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("south", r"`client` is 'south', the name of clients \[1, 2\]; expected one of these numbers"),
        ("nort", "`client` is 'nort'; did you mean `north`?"),
        ("7", r"`client` is '7'; expected a number from 0 to 2, or one of `north`, `south`, `south`"),
    ],
)
def test_a_name_that_is_not_that_of_one_client_is_refused(client, expected):
    with pytest.raises(InvalidOption, match=expected):
        client_number(Fleet, client)


def test_a_number_that_is_the_name_of_another_client_is_reported():
    class Patients:
        num_clients, client_names = 3, np.array(["0", "2", "1"])

    assert client_number(Patients, "2") == 1
    assert client_number(Patients, np.int64(0)) == 0
    with pytest.warns(UserWarning, match="`client` 2 is a number; the client with the name '2' has number 1"):
        assert client_number(Patients, 2) == 2


@pytest.mark.parametrize("client", [True, 1.5, None])
def test_what_is_neither_a_number_nor_a_name_is_refused(client):
    with pytest.raises(InvalidOption, match=f"`client` is {client}; expected a whole number or a string"):
        client_number(Fleet, client)


def test_data_without_names_takes_numbers():
    class Nameless:
        num_clients = 3

    assert client_number(Nameless, 2) == 2
    with pytest.raises(InvalidOption, match="but the data names no clients; expected a number from 0 to 2"):
        client_number(Nameless, "north")
