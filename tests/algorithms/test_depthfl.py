"""DepthFL: who has which blocks, how its exits are combined, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.networks import Classifier, EarlyExits
from lightning_sparsefl import DepthFL
from lightning_sparsefl.callbacks import GradientOffset, ProximalTerm
from lightning_sparsefl.callbacks.exits import EarlyExits as Exits
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import ExitMNISTNet, ExitResNet18
from lightning_sparsefl.types import CostFacts, Merged, Update


@pytest.fixture
def start(start_exits):
    return lambda *given: start_exits(*given)[1:]


class Prompted(torch.nn.Module):
    """A module whose exits keep a table beside their linear layer."""

    def __init__(self):
        super().__init__()
        self.body, self.exits, self.depth = torch.nn.Linear(2, 4), {"body": "exit"}, 1
        self.exit = torch.nn.ModuleDict({"linear": torch.nn.Linear(4, 3), "table": torch.nn.Embedding(5, 4)})


def test_a_table_of_an_exit_is_no_head(start):
    server, _ = start(DepthFL(), Prompted(), 1.0)
    assert sorted(server.extra["heads"]) == ["exit.linear.bias", "exit.linear.weight"]


def held(message):
    return [name for name in message.weights if name not in message.masks]


@pytest.mark.parametrize(("capacity", "blocks"), [(0.0625, 1), (0.33, 1), (0.34, 1), (0.67, 2), (1.0, 3)])
def test_a_client_has_the_first_blocks_and_their_exits(start, capacity, blocks):
    server, (person,) = start(DepthFL(), ExitMNISTNet(), capacity)
    message = DepthFL().download(server, person)
    starts = [f"net.{part}.{place}." for part in ("blocks", "exits") for place in range(blocks)]
    assert held(message) == [name for name in message.weights if name.startswith(tuple(starts))]
    assert not any(bool(mask.any()) for mask in message.masks.values())
    assert all(bool((message.weights[name] == 0).all()) for name in message.masks)
    assert int(message.extra["depth"]["blocks"]) == blocks


@pytest.mark.parametrize("capacity", [0.25, 0.5, 0.75, 1.0])
def test_a_client_is_scored_with_the_mean_over_its_own_exits(start, client, capacity):
    """The whole module, with the weights that are scored, predicts what the client's part alone does."""
    torch.manual_seed(0)
    module = ExitResNet18(10, norm="group")
    server, (person,) = start(DepthFL(), module, capacity)
    message = DepthFL().download_for(server, person, "score")
    someone, _ = client()
    x, depth = torch.randn(2, 3, 32, 32), round(4 * capacity)
    with torch.no_grad():
        module.depth = depth
        expected = torch.stack(module(x)).mean(0)
        module.depth = 4
        module.load_state_dict(dict(DepthFL().personalize(message, someone)))
        assert torch.allclose(torch.stack(module(x)).mean(0), expected, atol=1e-5)
    moved = Update(weights={name: 2 * value for name, value in message.weights.items()})
    doubled = DepthFL().trained(message, moved)
    own = DepthFL().personalize(message, someone)
    assert all(torch.allclose(doubled[name], 2 * own[name]) for name in own)


def test_the_strength_rises_over_the_rounds():
    strengths = [DepthFL().strength(round) for round in (0, 150, 300, 1000)]
    assert strengths == pytest.approx([0.0067379, 0.2865048, 1, 1], abs=1e-7)
    assert DepthFL(ramp=10).strength(10) == 1
    assert DepthFL(distill=False).strength(300) == 0


def test_callbacks_are_those_of_the_client_s_depth_and_of_feddyn(start, client):
    server, (person,) = start(DepthFL(), ExitMNISTNet(), 0.7)
    message = DepthFL().download(server, person)
    exits, pull = DepthFL().callbacks(message, client()[0])
    assert isinstance(exits, Exits)
    assert (exits.depth, exits.strength) == (2, pytest.approx(0.0067379, abs=1e-7))
    assert isinstance(pull, ProximalTerm)
    memory = {"gradient": {"net.exits.0.fc.bias": torch.ones(10)}}
    _, linear, _ = DepthFL().callbacks(message, client(memory=memory)[0])
    assert isinstance(linear, GradientOffset)
    assert bool((linear.offset["net.exits.0.fc.bias"] == -1).all())
    (alone,) = DepthFL(alpha=0.0).callbacks(message, client(memory=memory)[0])
    assert isinstance(alone, Exits)


def test_a_client_keeps_the_gradients_of_blocks_that_it_does_not_have_this_time(start, client):
    """Capacities may be drawn anew in every round (`federation.redraw_capacities`)."""
    method = DepthFL(alpha=0.5)
    server, (whole, first) = start(method, EarlyExits(), 1.0, 0.01)
    assert (method.alike(server, whole), method.alike(server, first)) == (2, 1)
    message = method.download(server, first)
    before = {name: torch.ones_like(value) for name, value in server.weights.items()}
    trained = {name: value + 1 for name, value in message.weights.items()}
    after = method.train(message, client(trained, memory={"gradient": before})[0]).memory["gradient"]
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert bool((value == (1 if name in message.masks else 0.5)).all())


def test_each_tensor_is_corrected_by_the_share_of_the_fleet_that_trained_it(start):
    """Four clients of which two report, and one of them has the second block."""
    method = DepthFL(alpha=0.5)
    server, _ = start(method, EarlyExits(), *[1.0] * 4)
    ones = {name: value + 1 for name, value in server.weights.items()}
    deep = {
        name: torch.ones_like(v, dtype=torch.int32) for name, v in ones.items() if "second" in name or "two" in name
    }
    after = method.aggregate(server, Merged(weights=ones, covered={}, reports={0: {}, 1: {}}, voters=deep))
    for name, value in after.weights.items():
        h = -0.5 * (1 if name in deep else 2) / 4
        assert torch.allclose(after.extra["h"][name], torch.full_like(value, h)), name
        assert torch.allclose(value, ones[name] - h / 0.5, atol=1e-6), name


def test_a_tensor_that_nobody_has_keeps_its_value(start):
    method = DepthFL()
    server, _ = start(method, EarlyExits(), 0.5, 0.5)
    server = replace(server, extra={**server.extra, "h": {n: torch.ones_like(h) for n, h in server.extra["h"].items()}})
    absent = {name: torch.zeros_like(v, dtype=torch.bool) for name, v in server.weights.items() if "two" in name}
    merged = Merged(
        weights={name: value + 1 for name, value in server.weights.items()},
        covered=absent,
        reports={0: {}},
        voters={name: mask.int() for name, mask in absent.items()},
    )
    after = method.aggregate(server, merged)
    for name in absent:
        assert torch.equal(after.weights[name], server.weights[name])
        assert torch.equal(after.extra["h"][name], server.extra["h"][name])


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_costs_are_those_of_the_blocks_and_exits(start, blocks):
    module = ExitMNISTNet()
    server, (person,) = start(DepthFL(), module, blocks / 3)
    message, sample = DepthFL().download(server, person), torch.zeros(1, 1, 28, 28)
    layers = count_layers(module, sample)
    costs = DepthFL().costs(CostFacts(view=person, message=message, layers=layers, epochs=2, samples=5, batch_size=5))
    own = tuple(f"net.{part}.{place}." for part in ("blocks", "exits") for place in range(blocks))
    work = sum(2 * layer.macs + layer.bias for layer in layers if layer.weight.startswith(own))
    assert costs.flops_paper == pytest.approx(3 * 2 * 5 * work)
    assert costs.flops_analytic == pytest.approx(3 * 2 * 5 * work)
    sent = sum(value.numel() for name, value in module.named_parameters() if name.startswith(own))
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * sent


def test_fine_tuning_trains_the_client_s_own_exits(start, client):
    method = DepthFL()
    server, (person, _) = start(method, EarlyExits(), 0.5, 1.0)
    message = method.download_for(server, person, "finetune")
    someone, script = client(message.weights)
    tuned = method.finetune_for(message, someone, 2)
    ((weights, masks, _, callbacks),) = script.fits
    assert (weights, masks, script.epochs) == (message.weights, message.masks, [2])
    assert {"net.two.bias", "net.two.weight"} <= set(masks)
    assert [type(callback) for callback in callbacks] == [Exits]
    torch.testing.assert_close(tuned, method.personalize(message, someone))


def test_a_module_without_exits_is_refused_before_training(federation):
    expected = (
        "`algorithm` is DepthFL, which trains models with early exits, but `Classifier` has none; expected a module"
    )
    with pytest.raises(InvalidOption, match=expected):
        federation(DepthFL(), module=Classifier())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"alpha": -0.1}, "`algorithm.alpha` is -0.1; expected a number >= 0"),
        ({"ramp": 0}, "`algorithm.ramp` is 0; expected a whole number >= 1"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        DepthFL(**options)
