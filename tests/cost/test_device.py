"""Capacities that are drawn, and the seconds of a client-round."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import ClientView


def view(client=0, round=0, capacity=0.3):
    return ClientView(id=client, num_examples=1, capacity=capacity, round=round, max_rounds=9, seed=3)


def test_a_device_that_changes_is_drawn_evenly_from_five_classes():
    drawn = Counter(Devices(dynamic=True).capacity(view(round=r)) for r in range(2000))
    assert set(drawn) == {1, 1 / 2, 1 / 4, 1 / 8, 1 / 16}
    assert all(350 < count < 450 for count in drawn.values())


def test_a_device_that_stays_is_the_federation_s():
    assert {Devices().capacity(view(round=r, capacity=0.3)) for r in range(50)} == {0.3}


def test_seconds_by_hand():
    devices = Devices(flops_per_second=100.0, bytes_per_second=10.0, alpha=2.0)
    assert devices.seconds(0.5, 300.0, 40.0) == 300 / 50 + 2 * 40 / 10
    assert Devices(flops_per_second=100.0, alpha=0.0).seconds(0.5, 300.0, 40.0) == 300 / 50


@pytest.mark.parametrize(
    "options",
    [
        {"levels": (0.0,)},
        {"levels": ()},
        {"levels": (1.5,)},
        {"flops_per_second": 0},
        {"bytes_per_second": -1},
        {"alpha": -1},
    ],
)
def test_bad_options_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidOption, match=rf"`Devices\.{name}` is {re.escape(repr(value))}; expected"):
        Devices(**options)
