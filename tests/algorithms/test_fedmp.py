"""FedMP: what is pruned, how ratios are rewarded, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedMP
from lightning_sparsefl.cost import eucb
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.units import unit_norms
from lightning_sparsefl.sparse.width import held_units, prefix_units
from lightning_sparsefl.types import Merged, ServerState


def test_the_units_of_the_largest_weights_are_kept(mlp):
    server, (person,) = mlp.start(FedMP(ratio=0.6), 1.0)
    held = held_units(mlp.units, FedMP(ratio=0.6).download(server, person).masks)
    for name, norms in unit_norms(mlp.units, server.weights).items():
        assert int(held[name].sum()) == {16: 6, 8: 3}[len(norms)]
        assert norms[held[name]].min() > norms[~held[name]].max()


def test_the_largest_weights_are_those_of_the_round(mlp):
    method = FedMP(ratio=0.9)
    server, (person,) = mlp.start(method, 1.0)
    grown = {name: value.clone() for name, value in server.weights.items()}
    first = mlp.units[0]
    grown[f"{first.layers[0]}.weight"][7] = 100.0
    held = held_units(mlp.units, method.download(replace(server, weights=grown), person).masks)
    assert bool(held[first.name][7])


def test_a_ratio_is_a_function_of_client_and_round(mlp):
    method = FedMP()
    _, views = mlp.start(method, *[1.0] * 50)
    first = [method.pruned(view) for view in views]
    assert first == [method.pruned(view) for view in views]
    assert len(set(first)) == 50
    assert 0 <= min(first) < 0.2
    assert 0.8 < max(first) < 1
    assert method.pruned(replace(views[0], round=1)) != first[0]


def merged(losses, seconds):
    reports = {k: {"train_loss": loss, "seconds": seconds[k]} for k, loss in losses.items()}
    return Merged(weights={"w": torch.zeros(2)}, covered={}, kind="difference", reports=reports)


def test_a_ratio_earns_the_fall_of_the_loss_over_the_distance_in_time(view):
    """Losses of 2 and then 1.5; times 1, 2 and 3 s, so that two clients are 1 s away and one is on the mean."""
    method, server = FedMP(), ServerState(round=0, weights={"w": torch.zeros(2)})
    times = {0: 1.0, 1: 2.0, 2: 3.0}
    first = method.aggregate(server, merged({0: 1.0, 1: 2.0, 2: 3.0}, times))
    assert method.observe(first, view(0), {"train_loss": 1.0, "seconds": 1.0}) is None
    second = method.aggregate(first, merged({0: 1.5, 1: 1.0, 2: 2.0}, times))
    for client, reward in {0: 0.5, 1: 500.0, 2: 0.5}.items():
        person = view(client, round=1)
        state = method.observe(second, person, {"train_loss": 0.0, "seconds": times[client]})["bandit"]
        assert state["pulls"] == [[method.pruned(person), pytest.approx(reward)]]
        assert state["edges"] == [0.0, method.pruned(person), 1.0]
        again = view(client, round=2, shared={"bandit": state})
        other = method.observe(second, again, {"train_loss": 0.0, "seconds": 5.0})["bandit"]
        assert other == eucb.learn(state, method.pruned(again), 0.5 / 3, eucb.EUCBOptions())


def test_a_loss_that_is_not_a_number_earns_nothing(view):
    method, server = FedMP(), ServerState(round=0, weights={"w": torch.zeros(2)})
    for loss in (1.0, float("nan")):
        server = method.aggregate(server, merged({0: loss, 1: 1.0}, {0: 1.0, 1: 2.0}))
    assert method.observe(server, view(1, round=1), {"train_loss": 1.0, "seconds": 2.0}) is None


def test_one_ratio_for_all_learns_nothing(view):
    method, server = FedMP(ratio=0.5), ServerState(round=0, weights={"w": torch.zeros(2)})
    assert method.aggregate(server, merged({0: 1.0}, {0: 1.0})).extra == {}
    assert method.observe(server, view(0), {"seconds": 1.0}) is None


def test_time_depends_on_capacity(view):
    method = FedMP(flops_per_second=100.0, bytes_per_second=10.0)
    assert method.simulated_seconds(view(capacity=0.5), 200.0, 30) == pytest.approx(4.0 + 3.0)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75])
def test_costs_are_those_of_the_narrow_network(mlp, ratio):
    server, (person,) = mlp.start(FedMP(ratio=ratio), 1.0)
    mlp.check_costs(FedMP(ratio=ratio), server, person, [prefix_units(mlp.units, 1 - ratio)])


def test_a_module_that_does_not_log_its_loss_is_refused_by_name(federation):
    with pytest.raises(InvalidOption, match=r"FedMP rewards pruning ratios by `loss`, but a client reported \["):
        federation(FedMP(loss="loss"), rounds=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ratio": 1.0}, r"`algorithm.ratio` is 1.0; expected a number in \[0, 1\), or null"),
        ({"discount": 0.0}, r"`algorithm.discount` is 0.0; expected a number in \(0, 1\]"),
        ({"width": 0.0}, "`algorithm.width` is 0.0; expected a number above 0"),
        ({"flops_per_second": 0.0}, "`algorithm.flops_per_second` is 0.0; expected a number above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        FedMP(**options)
