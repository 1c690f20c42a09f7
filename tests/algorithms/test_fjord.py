"""FjORD: who holds what, what it costs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FjORD
from lightning_sparsefl.callbacks import OrderedDropout
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.width import held_units, prefix_units


@pytest.mark.parametrize(("capacity", "rate"), [(0.2, 0.2), (0.39, 0.2), (0.6, 0.6), (1.0, 1.0)])
def test_a_client_holds_the_prefix_of_the_largest_rate_within_its_capacity(mlp, capacity, rate):
    server, (person,) = mlp.start(FjORD(), capacity)
    for message in (FjORD().download(server, person), FjORD().download_for(server, person, "score")):
        held, expected = held_units(mlp.units, message.masks), prefix_units(mlp.units, rate)
        assert (held is None) == (rate == 1)
        assert held is None or all(torch.equal(held[name], expected[name]) for name in expected)
        assert float(message.extra["width"]["rate"]) == rate


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("capacity", "parameters"), [(0.2, 457_216), (0.4, 1_802_594), (0.6, 4_048_274)])
def test_parameters_of_the_sub_model_of_a_capacity(preresnet, capacity, parameters):
    server, (person,) = preresnet.start(FjORD(), capacity)
    assert preresnet.sent(FjORD().download(server, person)) == parameters


def test_a_client_draws_from_the_rates_that_it_holds(mlp, client):
    server, (person,) = mlp.start(FjORD(), 0.7)
    someone, script = client()
    script.units = mlp.units
    (dropout,) = FjORD(distill=True).callbacks(FjORD().download(server, person), someone)
    assert isinstance(dropout, OrderedDropout)
    assert dropout.rates == (0.2, 0.4, 0.6)
    assert dropout.distill
    (again,) = FjORD().callbacks(FjORD().download(server, person), someone)
    assert again.seed != dropout.seed  # a second fit has draws of its own
    server, (person,) = mlp.start(FjORD(), 0.2)
    assert not FjORD().callbacks(FjORD().download(server, person), someone)


def test_the_named_layer_has_the_logits(mlp, client):
    method = FjORD(distill=True, head="2")
    server, (person,) = mlp.start(method, 0.7)
    (dropout,) = method.callbacks(method.download(server, person), client()[0])
    assert dropout.head == "2"


def test_clients_of_one_width_are_stacked(mlp):
    server, people = mlp.start(FjORD(), 0.4, 0.5, 1.0)
    assert [FjORD().alike(server, person) for person in people] == [0.4, 0.4, 1.0]


@pytest.mark.parametrize("capacity", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("distill", [False, True])
def test_costs_are_the_bytes_of_the_largest_and_the_mean_work_of_all(mlp, capacity, distill):
    method = FjORD(distill=distill)
    server, (person,) = mlp.start(method, capacity)
    costs = method.costs(mlp.facts(method, server, person))
    nets = [cut(mlp.module, mlp.units, prefix_units(mlp.units, rate)) for rate in method.rates if rate <= capacity]
    work = [2 * 5 * 3 * sum(2 * layer.macs + layer.bias for layer in count_layers(net, mlp.sample)) for net in nets]
    assert costs.flops_paper == costs.flops_analytic == pytest.approx(sum(work) / len(work) + distill * work[-1])
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * sum(p.numel() for p in nets[-1].parameters())


def test_a_capacity_below_all_rates_is_refused(mlp):
    with pytest.raises(InvalidOption, match=r"the capacity 0.1, and the smallest of `algorithm.rates` is 0.2"):
        mlp.start(FjORD(), 0.1)


@pytest.mark.parametrize("rates", [(), (0.5, 1.2), (0.0, 1.0)])
def test_options_out_of_range_are_refused(rates):
    with pytest.raises(InvalidOption, match=r"`algorithm.rates` is .*; expected one or more numbers in \(0, 1\]"):
        FjORD(rates=rates)
