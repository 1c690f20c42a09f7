"""ScaleFL: who has which part of the model, by which exit it predicts, what it costs, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.networks import EarlyExits
from lightning_sparsefl import DepthFL, ScaleFL
from lightning_sparsefl.callbacks.exits import TaughtExits
from lightning_sparsefl.callbacks.width import OutputScaler
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import ExitMNISTNet, ExitResNet18
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.width import ranked_units
from lightning_sparsefl.types import CostFacts, Merged, Update

MNIST, WIDTHS = (1, 1, 28, 28), (0.5, 0.75, 1.0)


@pytest.mark.parametrize(("capacity", "depth"), [(0.1, 1), (0.34, 1), (0.67, 2), (1.0, 3)])
def test_a_client_has_the_first_units_of_the_first_blocks(start_exits, capacity, depth):
    method, module = ScaleFL(widths=WIDTHS), ExitMNISTNet()
    _, server, (person,) = start_exits(method, module, capacity, side=MNIST)
    message = method.download(server, person)
    assert method.alike(server, person) == int(message.extra["depth"]["blocks"]) == depth
    deeper = [name for name in message.weights if name.split(".")[2] not in map(str, range(depth))]
    assert set(deeper) == {name for name, mask in message.masks.items() if not bool(mask.any())}
    first = module.net.blocks[0][0]
    kept = int(WIDTHS[depth - 1] * first.out_channels)
    held = message.masks.get("net.blocks.0.0.weight", torch.ones_like(first.weight, dtype=torch.bool))
    assert bool(held[:kept].all())
    assert not bool(held[kept:].any())
    assert all(bool((message.weights[name][~mask] == 0).all()) for name, mask in message.masks.items())


def test_the_warmup_is_a_part_of_the_run():
    methods = [ScaleFL(), ScaleFL(strength=0.0), ScaleFL(warmup=0.0)]
    assert [method.follows_length for method in methods] == [True, False, False]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_client_is_scored_by_the_last_exit_of_its_network(start_exits, client, depth):
    """The whole module, with the weights that are scored, predicts what the cut network's last exit does."""
    torch.manual_seed(0)
    method, module = ScaleFL(), ExitResNet18(10, norm="batch")
    x = torch.randn(4, 3, 32, 32)
    model, server, (person,) = start_exits(method, module, depth / 4, side=(1, 3, 32, 32))
    message = method.download_for(server, person, "score")
    units = ranked_units(model.units, method.widths[depth - 1], "ordered", rounding="down")
    with torch.no_grad():
        narrow = cut(module.eval(), model.units, units)
        narrow.depth = depth
        expected = narrow(x)[-1]
        module.load_state_dict(dict(method.personalize(message, client()[0])), strict=False)
        torch.testing.assert_close(torch.stack(module(x)).mean(0), expected, atol=1e-4, rtol=1e-4)
    moved = Update(weights={name: 2 * value for name, value in message.weights.items()})
    doubled, own = method.trained(message, moved), method.personalize(message, client()[0])
    assert all(torch.equal(doubled[name], 2 * own[name]) for name in own)


def test_the_server_s_model_predicts_by_its_last_exit_and_keeps_the_others(start_exits):
    method, module = ScaleFL(widths=(0.5, 1.0)), EarlyExits()
    nn.init.ones_(module.net["one"].weight)
    _, server, _ = start_exits(method, module, 1.0, side=(2, 8))
    last, first = server.weights["net.two.weight"], server.weights["net.one.weight"]
    assert torch.equal(last, 2 * module.net["two"].weight)
    assert not bool(first.any())
    assert bool((method.weights_to_step(server)["net.one.weight"] == 1).all())
    merged = {name: value + 1 for name, value in method.weights_to_step(server).items()}
    after = method.aggregate(server, Merged(weights=merged, covered={}))
    assert bool((method.weights_to_step(after)["net.one.weight"] == 2).all())
    assert torch.equal(after.weights["net.two.weight"], 2 * (module.net["two"].weight + 1))


def test_the_last_exit_teaches_after_the_warmup(start_exits, client):
    method = ScaleFL(widths=WIDTHS, strength=0.5, temperature=2.0, warmup=0.2)
    _, server, (person,) = start_exits(method, ExitMNISTNet(), 0.7, side=MNIST)
    message = method.download(server, person)
    found = []
    for round in (0, 2, 3):
        (exits, scaler) = method.callbacks(message, client(round=round, max_rounds=10)[0])
        assert isinstance(exits, TaughtExits)
        assert isinstance(scaler, OutputScaler)
        assert scaler.rate == 0.75
        found.append((exits.depth, exits.strength, exits.temperature))
    assert found == [(2, 0.0, 2.0), (2, 0.0, 2.0), (2, 0.5, 2.0)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_costs_are_those_of_the_narrow_blocks_and_exits(start_exits, depth):
    method, module = ScaleFL(widths=WIDTHS), ExitMNISTNet()
    model, server, (person,) = start_exits(method, module, depth / 3, side=MNIST)
    message = method.download(server, person)
    facts = {"view": person, "message": message, "epochs": 2, "samples": 5, "batch_size": 5}
    costs = method.costs(CostFacts(layers=count_layers(module, torch.zeros(MNIST)), model=model, **facts))
    narrow = cut(module, model.units, ranked_units(model.units, WIDTHS[depth - 1], "ordered", rounding="down"))
    own = tuple(f"net.{part}.{place}." for part in ("blocks", "exits") for place in range(depth))
    layers = [layer for layer in count_layers(narrow, torch.zeros(MNIST)) if layer.weight.startswith(own)]
    assert costs.flops_paper == pytest.approx(3 * 2 * 5 * sum(2 * layer.macs + layer.bias for layer in layers))
    sent = sum(value.numel() for name, value in narrow.named_parameters() if name.startswith(own))
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * sent


def test_a_whole_network_of_equal_exits_is_that_of_depthfl(start_exits):
    module, (one, other) = ExitMNISTNet(), (ScaleFL(widths=(1.0, 1.0, 1.0)), DepthFL(alpha=0.0))
    (_, ours, (person,)), (_, theirs, _) = (start_exits(method, module, 0.7, side=MNIST) for method in (one, other))
    assert ours.extra["blocks"] == theirs.extra["blocks"]
    messages = [one.download(ours, person), other.download(theirs, person)]
    assert all(torch.equal(messages[0].weights[name], value) for name, value in messages[1].weights.items())
    assert messages[0].masks.keys() == messages[1].masks.keys()


def test_a_width_for_each_exit_is_expected(federation):
    expected = r"`algorithm.widths` is \(0.5, 0.5, 1.0\); expected 2 numbers, one for each block of `model`"
    with pytest.raises(InvalidOption, match=expected):
        federation(ScaleFL(widths=(0.5, 0.5, 1.0)), module=EarlyExits())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"widths": ()}, r"`algorithm.widths` is \(\); expected one or more numbers in \(0, 1\]"),
        ({"widths": (0.5, 1.1)}, r"`algorithm.widths` is \(0.5, 1.1\); expected"),
        ({"strength": -0.1}, "`algorithm.strength` is -0.1; expected a number >= 0"),
        ({"temperature": 0.0}, "`algorithm.temperature` is 0.0; expected a number above 0"),
        ({"warmup": 1.5}, r"`algorithm.warmup` is 1.5; expected a number in \[0, 1\]"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        ScaleFL(**options)
