"""FedRolex: where the window is, who holds what, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedRolex
from lightning_sparsefl.callbacks.width import OutputScaler
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.width import held_units, prefix_units

RATES = (1.0, 0.5, 0.3)


def windows(mlp, method, capacity, rounds):
    """The units of both hidden layers that a client holds, round after round."""
    server, (person,) = mlp.start(method, capacity)
    for round in range(rounds):
        message = method.download(server, replace(person, round=round))
        yield [held.nonzero().flatten().tolist() for held in held_units(mlp.units, message.masks).values()]


def test_the_window_moves_by_one_unit_and_begins_anew(mlp):
    """16 units of which .3 are 5, 8 of which they are 3."""
    found = list(windows(mlp, FedRolex(rates=RATES), 0.3, 14))
    assert found[0] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert found[1] == [[1, 2, 3, 4, 5], [1, 2, 3]]
    assert found[6] == [[6, 7, 8, 9, 10], [0, 6, 7]]
    assert found[13] == [[0, 1, 13, 14, 15], [5, 6, 7]]


def test_the_code_s_window_moves_back_as_torch_roll_does(mlp):
    for round, (first, second) in enumerate(windows(mlp, FedRolex(rates=RATES, direction="back"), 0.3, 5)):
        assert first == sorted(torch.roll(torch.arange(16), round)[:5].tolist())
        assert second == sorted(torch.roll(torch.arange(8), round)[:3].tolist())


@pytest.mark.parametrize("direction", ["forward", "back"])
def test_after_as_many_rounds_as_units_each_was_held_equally_often(mlp, direction):
    seen = [torch.zeros(16), torch.zeros(8)]
    for layers in windows(mlp, FedRolex(rates=RATES, direction=direction), 0.3, 16):
        for count, units in zip(seen, layers, strict=True):
            count[units] += 1
    assert [set(count.tolist()) for count in seen] == [{5.0}, {6.0}]


def test_the_client_learns_its_rate_from_the_message(mlp, client):
    method = FedRolex(rates=RATES)
    server, (person,) = mlp.start(method, 0.6)
    someone, script = client(capacity=1.0)
    script.units = mlp.units
    (scaler,) = method.callbacks(method.download(server, person), someone)
    assert isinstance(scaler, OutputScaler)
    assert scaler.rate == 0.5
    assert not FedRolex(rates=RATES, scaler=False).callbacks(method.download(server, person), someone)


def test_clients_are_scored_with_the_whole_model(mlp):
    method = FedRolex(rates=RATES)
    server, (person,) = mlp.start(method, 0.3)
    assert method.download_for(server, person, "score").weights is server.weights
    assert not method.download_for(server, person, "score").masks


def test_clients_of_one_width_are_stacked(mlp):
    method = FedRolex(rates=RATES)
    server, people = mlp.start(method, 0.3, 0.4, 0.6, 1.0)
    assert [method.alike(server, person) for person in people] == [0.3, 0.3, 0.5, 1.0]


def test_only_a_rate_of_one_trains_the_full_model():
    assert FedRolex(rates=RATES).at_full_capacity == "trains the full model on every client"
    assert FedRolex(rates=(0.5, 0.25)).at_full_capacity is None


@pytest.mark.parametrize("capacity", [0.3, 0.5, 1.0])
def test_costs_are_those_of_the_narrow_network(mlp, capacity):
    method = FedRolex(rates=RATES)
    server, (person,) = mlp.start(method, capacity)
    mlp.check_costs(method, server, replace(person, round=11), [prefix_units(mlp.units, capacity)])


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("capacity", "parameters"), [(0.0625, 44_510), (0.25, 701_018), (1.0, 11_172_170)])
def test_parameters_of_the_sub_model_of_a_capacity(preresnet, capacity, parameters):
    server, (person,) = preresnet.start(FedRolex(), capacity)
    assert preresnet.sent(FedRolex().download(server, replace(person, round=70))) == parameters


def test_a_capacity_below_all_rates_is_refused(mlp):
    with pytest.raises(InvalidOption, match=r"the capacity 0.2, and the smallest of `algorithm.rates` is 0.3"):
        mlp.start(FedRolex(rates=RATES), 0.2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rates": ()}, r"`algorithm.rates` is \(\); expected one or more numbers in \(0, 1\]"),
        ({"rates": (0.5, 2.0)}, r"`algorithm.rates` is \(0.5, 2.0\); expected one or more numbers in"),
        ({"direction": "left"}, "`algorithm.direction` is 'left'; expected one of 'forward', 'back', 'fixed'"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        FedRolex(**options)
