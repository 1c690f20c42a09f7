"""FedOpt without a federation: the small numbers of its rules, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, FedOpt
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Merged


def scalar(value):
    return {"w": torch.tensor([value], dtype=torch.float64)}


def after(method, changes, fleet):
    """The weight after the server's rounds with these mean changes, from 0."""
    server = method.init(scalar(0.0), fleet())
    for number, change in enumerate(changes):
        mean = {"w": server.weights["w"] + change}
        server = method.aggregate(server, Merged(weights=mean, covered={}))
        server = type(server)(number + 1, server.weights, server.masks, server.extra)
    return float(server.weights["w"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rule": "adagrad", "beta1": 0.9}, 0.0135645152),
        ({"rule": "adagrad"}, 0.0552186725),
        ({"rule": "adam"}, 0.1346050053),
        ({"rule": "yogi"}, 0.1344635186),
        ({"rule": "momentum"}, 1.4),
        ({"rule": "momentum", "beta1": 0}, 0.5),
    ],
    ids=str,
)
def test_two_rounds_of_one_number(options, expected, fleet):
    assert after(FedOpt(**options), [1.0, -0.5], fleet) == pytest.approx(expected, abs=1e-9)


def test_adamw_is_that_of_torch(fleet):
    weight = torch.nn.Parameter(torch.tensor([0.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01)
    changes = [1.0, -0.5, 0.25]
    for change in changes:
        weight.grad = torch.tensor([-change], dtype=torch.float64)
        optimizer.step()
    assert after(FedOpt(rule="adamw"), changes, fleet) == pytest.approx(weight.item(), abs=1e-12)


def test_the_first_round_as_it_is(fleet):
    assert after(FedOpt(rule="yogi", start="mean"), [0.25], fleet) == 0.25
    m, v = 0.9 * 0.25 + 0.1 * 0.5, 0.25**2 + 0.01 * 0.5**2
    expected = 0.25 + 0.1 * m / (v**0.5 + 1e-3)
    assert after(FedOpt(rule="yogi", start="mean"), [0.25, 0.5], fleet) == pytest.approx(expected)


def test_buffers_are_averaged_and_have_no_moments(fleet):
    weights = {"w": torch.zeros(2), "mean": torch.zeros(2)}
    method = FedOpt()
    server = method.init(weights, fleet(buffers=["mean"]))
    assert {key: list(tree) for key, tree in server.extra.items()} == {"m": ["w"], "v": ["w"]}
    merged = Merged(weights={"w": torch.ones(2), "mean": torch.full((2,), 3.0)}, covered={})
    assert method.aggregate(server, merged).weights["mean"].tolist() == [3.0, 3.0]


def test_without_momentum_it_is_fedavg(federation):
    plain = federation(FedAvg(), precision="64-true", folder="plain")
    opt = federation(FedOpt(rule="momentum", beta1=0, lr=1), precision="64-true", folder="opt")
    ours, theirs = (torch.load(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True) for run in (opt, plain))
    for name, value in theirs["state_dict"].items():
        assert torch.allclose(ours["state_dict"][name], value, rtol=0, atol=1e-6), name


def test_costs_are_those_of_fedavg(facts):
    assert FedOpt().costs(facts()) == FedAvg().costs(facts())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "sgd"}, "`algorithm.rule` is 'sgd'; expected one of 'momentum'"),
        ({"lr": 0.0}, "`algorithm.lr` is 0.0; expected a number above 0, or null"),
        ({"lr": float("nan")}, "`algorithm.lr` is nan"),
        ({"beta1": 1.0}, r"`algorithm.beta1` is 1.0; expected a number in \[0, 1\), or null"),
        ({"beta2": -0.1}, "`algorithm.beta2` is -0.1"),
        ({"tau": 0}, "`algorithm.tau` is 0; expected a number above 0"),
        ({"weight_decay": -1}, "`algorithm.weight_decay` is -1; expected a number >= 0"),
        ({"start": "raw"}, "`algorithm.start` is 'raw'; expected one of 'zero', 'mean'"),
        ({"rule": "adamw", "start": "mean"}, "`algorithm.start` is 'mean'; expected 'zero' with the rule 'adamw'"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options, said):
    with pytest.raises(InvalidOption, match=said):
        FedOpt(**options)
